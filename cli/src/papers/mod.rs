//! Tables and models from the papers that introduced the codecs.

pub mod codecs;
pub mod model;
pub mod predict;
pub mod table2;
