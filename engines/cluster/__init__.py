"""A discrete-event simulation of workers, their queues and the links between them."""
