//! Tables and models of the papers that the codecs come from.

pub mod codecs;
pub mod model;
pub mod predict;
pub mod table2;
