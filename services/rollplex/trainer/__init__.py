"""The trainer: exact split training of the actor. Start with README.md."""
