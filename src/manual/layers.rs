//! # Layers
//!
//! A module imports modules of lower layers only, never its siblings. `tests/layers.rs` reads the
//! table below and the imports of every file, and fails on the first import that breaks it.
//!
//! | layer | modules |
//! | --- | --- |
//! | 8 | ffi testing |
//! | 7 | comm |
//! | 6 | engine |
//! | 5 | plan |
//! | 4 | transport |
//! | 3 | mem |
//! | 2 | bootstrap codec gpu reduce |
//! | 1 | adapt config schedule simd sync sys |
//! | 0 | error types |
//!
//! `reduce` (element arithmetic: widen, combine, round) stands beside `codec`: a codec sees fp32
//! only, so that data types and codecs stay independent axes.
