//! Many ranks in one process, reference results, error bounds.

mod bound;
mod compare;
mod data;
mod numbers;
mod reference;

pub use bound::RawBound;
pub use compare::Comparison;
pub use data::{Data, Pattern, gaussian, random_word, uniform};
pub use reference::{Expected, Inputs, Problem};
