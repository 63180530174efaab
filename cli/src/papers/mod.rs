//! Tables and models of the papers that the codecs come from.

pub mod codecs;
#[cfg(test)]
mod figures_tests;
pub mod model;
pub mod predict;
pub mod table2;
