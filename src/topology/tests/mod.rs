//! Tests of the whole topology: machines with published predictions.

mod machines;
mod predictions;
mod rank_topologies;
mod xml_input;
