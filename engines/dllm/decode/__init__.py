"""From hidden states to committed tokens: logits in chunks, confidences, remasking."""
