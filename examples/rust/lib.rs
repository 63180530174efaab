//! Makes the examples beside this file a package, which sees only the public API of cinch.
