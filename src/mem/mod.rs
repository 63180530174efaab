//! Memory: the user's buffers, shared and private regions, and the slot layout in them.

mod buffers;
mod doorbell;
pub mod gpu;
mod region;
mod slots;
mod user;

pub use buffers::Buffers;
pub use doorbell::{DOORBELL_BYTES, Ringer, Sleeper};
pub use gpu::{
    ControlWords, DeviceBuffers, PeerBufferLayout, StagedRecv, StagedSend, Staging, private_bytes,
};
pub use region::Region;
pub use slots::{
    COUNTER_BYTES, Consumer, FifoPlaces, FifoShape, Fill, Header, LINE_BYTES, Place, Producer,
    StoreHints,
};
pub use user::{UserBuffers, bytes_of, bytes_of_mut};
