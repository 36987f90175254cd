"""What is looked at on nodes before training, and what is made of it."""
