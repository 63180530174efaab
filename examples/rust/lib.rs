//! Holds the package of the examples beside this file, which see the public API of cinch only.
