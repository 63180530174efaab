//! Tests of the whole topology: machines with published predictions.

mod detection;
mod fake_sys;
mod hostile;
mod machines;
mod pairs;
mod predictions;
mod rank_topologies;
mod xml_input;
