"""The built-in reward: Video-R1's rules, by the problem type of every single sample."""
