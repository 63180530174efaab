//! The error of the whole library: a kind, which C callers see as a code, and a sentence.
//!
//! The function that detects an error builds the sentence, with ranks, hosts, sizes and the next step.
//! Callers only add context with [`Error::context`].

use std::fmt;

/// Results with the [`Error`] of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The origin of an error. The C ABI maps each kind to one code, in `capi/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is outside its documented range.
    InvalidArgument,
    /// The call is not legal in this state or combination.
    InvalidUsage,
    /// The operating system refused a call.
    System,
    /// A peer died, left, or could not be reached.
    Remote,
    /// Ranks disagree about a call or about their settings.
    Mismatch,
    /// A deadline passed.
    Timeout,
    /// The communicator was aborted.
    Aborted,
    /// This build or this machine lacks a feature that the call needs.
    Unsupported,
    /// A defect of the library.
    Internal,
}

impl ErrorKind {
    /// Returns the kind as lower-case words.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::InvalidArgument => "invalid argument",
            ErrorKind::InvalidUsage => "invalid usage",
            ErrorKind::System => "system error",
            ErrorKind::Remote => "remote error",
            ErrorKind::Mismatch => "mismatch between ranks",
            ErrorKind::Timeout => "timeout",
            ErrorKind::Aborted => "aborted",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Internal => "internal error",
        }
    }
}

/// An error of any layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// Makes an error of `kind` with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            message: message.into(),
        }
    }

    /// Makes an [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    /// Makes an [`ErrorKind::InvalidUsage`].
    pub fn invalid_usage(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidUsage, message)
    }

    /// Makes an [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// Makes an [`ErrorKind::System`] from an error of the operating system.
    pub fn system(what: impl fmt::Display, cause: impl Into<std::io::Error>) -> Error {
        Error::new(ErrorKind::System, format!("{what}: {}", cause.into()))
    }

    /// Returns the origin of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Puts `what` in front of the sentence.
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error {
            kind: self.kind,
            message: format!("{what}: {}", self.message),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Error {}
