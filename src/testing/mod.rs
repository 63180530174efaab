//! Test support: communicators of many ranks in one process, reference results, and error bounds.

mod attack;
mod bound;
mod compare;
mod data;
mod local_world;
mod numbers;
mod plans;
mod random;
mod reference;
mod ties;

pub use crate::config::on_rdma_devices;
pub use attack::{Attack, attack};
pub use bound::RawBound;
pub use compare::Comparison;
pub use data::{Data, Pattern, gaussian, random_word, uniform};
pub use local_world::{local_world, try_local_world};
pub use numbers::{
    integer, largest, set_integer, set_value, smallest, unit_roundoff, value, wrap as wrap_integer,
};
pub use plans::{gpu_limits, plan_request};
pub use random::Random;
pub use reference::{Expected, Inputs, Problem, Segment};
pub use ties::has_near_ties;
