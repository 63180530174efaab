//! Tests of the whole topology: machines with published predictions.

mod detection;
mod fake_sys;
mod fragments;
mod hostile;
mod large;
mod limits;
mod machines;
mod messages;
mod nics;
mod pairs;
mod predictions;
mod probes;
mod rank_topologies;
mod search_time;
mod steps;
mod xml_input;
