"""Tables, images and benchmarks in, tensors with the id of each record's person out."""
