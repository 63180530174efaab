//! Tests of the whole topology: machines with published predictions.

mod detection;
mod fake_sys;
mod hostile;
mod machines;
mod messages;
mod pairs;
mod predictions;
<<<<<<< HEAD
mod rank_topologies;
mod xml_input;
=======
mod steps;
>>>>>>> b98869a (Predict schedules on clusters by flows and by messages)
