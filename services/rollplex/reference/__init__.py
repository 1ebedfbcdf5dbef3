"""Reference: scores responses under the frozen checkpoint. Start with README.md."""
