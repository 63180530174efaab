//! Types of the fields of [`Config`](crate::Config), and the table of all settings.

pub use crate::config::{
    CodecLinks, CodecRules, CollectiveSet, KNOBS, Knob, Note, Origin, Sharing, TuningChoice,
};
pub use crate::types::{DeviceChoice, Kernel, Protocol, Subsystem, Subsystems};
