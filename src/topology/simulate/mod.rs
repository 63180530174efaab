//! Predicts schedules on clusters of equal hosts, in two ways that must agree.
//!
//! | file | predicts by | up to |
//! | --- | --- | --- |
//! | `cluster` | the bytes of all flows on each link; the fullest link decides | any number of ranks: hosts are alike, so one stands for all |
//! | `messages` | the messages of a schedule, one after the other, on shared links | some hundred ranks |

mod cluster;
mod messages;

pub use cluster::{Cluster, ClusterPort};
pub use messages::{MessageSettings, simulate_messages};
