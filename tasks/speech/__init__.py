"""Speech: which word was said, and what was said, by an encoder over log-mel features."""
