//! The error type of the library: a kind, which C callers receive as a code, and a message.
//!
//! The function that detects an error writes the message, with ranks, hosts, sizes and the next step. Callers
//! only add context with [`Error::context`].

use std::fmt;

/// Results with the [`Error`] of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error. `capi/` maps each kind to one code of the C ABI.
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

/// An error of any layer of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// Creates an error of `kind` with this message.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            message: message.into(),
        }
    }

    /// Creates an error of kind [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    /// Creates an error of kind [`ErrorKind::InvalidUsage`].
    pub fn invalid_usage(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidUsage, message)
    }

    /// Creates an error of kind [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// Creates an error of kind [`ErrorKind::System`] from an error of the operating system.
    pub fn system(what: impl fmt::Display, cause: impl Into<std::io::Error>) -> Error {
        Error::new(ErrorKind::System, format!("{what}: {}", cause.into()))
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Puts `what` in front of the message.
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
