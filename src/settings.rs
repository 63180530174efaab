//! Types of the fields of [`Config`](crate::Config), and the table of all settings.

pub use crate::config::{
    CodecLinks, CodecRules, CollectiveSet, FileChoice, KNOBS, Knob, Note, Origin, Sharing,
};
pub use crate::types::{DeviceChoice, Kernel, Protocol, Subsystem, Subsystems};
