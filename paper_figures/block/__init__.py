"""Block diffusion: beside other ways to decode, and against what SGLang and others have published."""
