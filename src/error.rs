//! One error for the whole library: a kind, which C callers see as a code, and a sentence.
//!
//! Whoever decides that something is an error builds the sentence, with the ranks, hosts, sizes
//! and the next step in it. Callers only add context with [`Error::context`].

use std::fmt;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where an error comes from. The C ABI maps each kind to one code, in `capi/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is outside its documented range.
    InvalidArgument,
    /// The call is legal somewhere, but not in this state or with this combination.
    InvalidUsage,
    /// The operating system refused something.
    System,
    /// A peer died, left, or could not be reached.
    Remote,
    /// Ranks disagree about a call or about their settings.
    Mismatch,
    /// A deadline passed.
    Timeout,
    /// The communicator was aborted.
    Aborted,
    /// This build or this machine lacks what the call needs.
    Unsupported,
    /// A defect of the library.
    Internal,
}

impl ErrorKind {
    /// The kind as lower-case words.
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
    /// An error of `kind` with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            message: message.into(),
        }
    }

    /// An [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    /// An [`ErrorKind::InvalidUsage`].
    pub fn invalid_usage(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidUsage, message)
    }

    /// An [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// An [`ErrorKind::System`] from the operating system's last error.
    pub fn system(what: impl fmt::Display, cause: impl Into<std::io::Error>) -> Error {
        Error::new(ErrorKind::System, format!("{what}: {}", cause.into()))
    }

    /// Where the error comes from.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with `what` in front of its sentence.
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
