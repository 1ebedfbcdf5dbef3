"""What `rollplex bench` works on: a checkpoint of a published shape with random weights, and videos of a wanted size."""
