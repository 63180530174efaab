//! Essays: layers, one allreduce, memory ordering, adding things, dependencies.

pub mod dependencies;
pub mod layers;
