//! Tables and models from the papers that introduced the codecs.

pub mod codecs;
#[cfg(test)]
mod figures_tests;
pub mod model;
pub mod predict;
pub mod proofs;
pub mod table2;
