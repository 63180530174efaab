//! Nothing but a build script: see there.
