"""`rollplex bench`: one job under several schedules and sharing policies in one go, set against bounds, equation 1 and TRL."""
