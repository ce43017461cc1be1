"""What a model's configuration says about its K/V: from the fields of a file to bytes per token, block and sequence."""
