//! The operating system, wrapped: each call returns a `Result` with a sentence.
