//! The numbers of the header: element types, operators, collectives, algorithms, transports.
//!
//! The enums exist for the header. What comes from C is a plain integer (the `_number` aliases,
//! which the header prints as the enums), because a wrong number in a Rust enum is undefined.

use crate::error::{Error, Result};
use crate::types::{Algorithm, Collective, DType, TransportKind};

/// Version of the meaning of the structs' fields; the `cinch_*_default` macros pass it.
pub const CINCH_API_VERSION: u32 = 1;

/// The type of one element. Numbers are those of `ncclDataType_t`.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_dtype_t {
    /// Signed 8-bit integer.
    CINCH_I8 = 0,
    /// Unsigned 8-bit integer.
    CINCH_U8 = 1,
    /// Signed 32-bit integer.
    CINCH_I32 = 2,
    /// Unsigned 32-bit integer.
    CINCH_U32 = 3,
    /// Signed 64-bit integer.
    CINCH_I64 = 4,
    /// Unsigned 64-bit integer.
    CINCH_U64 = 5,
    /// IEEE binary16.
    CINCH_F16 = 6,
    /// IEEE binary32.
    CINCH_F32 = 7,
    /// IEEE binary64.
    CINCH_F64 = 8,
    /// The upper half of a binary32.
    CINCH_BF16 = 9,
    /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinity.
    CINCH_F8E4M3 = 10,
    /// OCP 8-bit float, 5 exponent and 2 mantissa bits.
    CINCH_F8E5M2 = 11,
}

/// How contributions are combined. The first five numbers are those of `ncclRedOp_t`; numbers
/// from `CINCH_OP_FIRST_CREATED` are made by `cinch_op_create_premulsum`.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_op_t {
    /// Sum; integers wrap.
    CINCH_SUM = 0,
    /// Product; integers wrap.
    CINCH_PROD = 1,
    /// Largest; NaN if any contribution is NaN.
    CINCH_MAX = 2,
    /// Smallest; NaN if any contribution is NaN.
    CINCH_MIN = 3,
    /// Sum divided once by the number of ranks; integers truncate.
    CINCH_AVG = 4,
    /// No operator; created ones have this number or a higher one.
    CINCH_OP_FIRST_CREATED = 16,
}

/// What a `cinch_call` does.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_collective_t {
    /// As `cinch_all_reduce`.
    CINCH_ALL_REDUCE = 0,
    /// As `cinch_all_gather`.
    CINCH_ALL_GATHER = 1,
    /// As `cinch_reduce_scatter`.
    CINCH_REDUCE_SCATTER = 2,
    /// As `cinch_broadcast`.
    CINCH_BROADCAST = 3,
    /// As `cinch_reduce`.
    CINCH_REDUCE = 4,
    /// As `cinch_gather`.
    CINCH_GATHER = 5,
    /// As `cinch_scatter`.
    CINCH_SCATTER = 6,
    /// As `cinch_all_to_all`.
    CINCH_ALL_TO_ALL = 7,
    /// As `cinch_send`.
    CINCH_SEND = 8,
    /// As `cinch_recv`.
    CINCH_RECV = 9,
}

/// A family of schedules.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_algorithm_t {
    /// Nothing is asked for: a call takes the communicator's, a communicator the environment's.
    CINCH_ALGORITHM_UNSET = 0,
    /// The cheapest, whatever the environment says. In configs only.
    CINCH_ALGORITHM_AUTO = 1,
    /// Neighbour to neighbour.
    CINCH_ALGORITHM_RING = 2,
    /// Two complementary binary trees.
    CINCH_ALGORITHM_TREE = 3,
    /// Everyone to everyone in one step.
    CINCH_ALGORITHM_ONESHOT = 4,
    /// Everyone to the owner of each chunk and back.
    CINCH_ALGORITHM_DIRECT = 5,
    /// Inside each host first, then between hosts, then inside again.
    CINCH_ALGORITHM_HIERARCHICAL = 6,
}

/// What carries data between two ranks.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_transport_t {
    /// In a config: nothing is asked for, the environment decides. In a report: no data moved.
    CINCH_TRANSPORT_UNSET = 0,
    /// The best that connects each pair, whatever the environment says. In configs only.
    CINCH_TRANSPORT_AUTO = 1,
    /// Threads of one process.
    CINCH_TRANSPORT_LOOPBACK = 2,
    /// Shared memory between processes of one host.
    CINCH_TRANSPORT_SHM = 3,
    /// TCP sockets.
    CINCH_TRANSPORT_TCP = 4,
    /// Memory of GPUs of one host.
    CINCH_TRANSPORT_CUDA = 5,
    /// RDMA over InfiniBand or RoCE.
    CINCH_TRANSPORT_RDMA = 6,
}

pub(super) type dtype_number = u32;
pub(super) type op_number = u32;
pub(super) type collective_number = u32;
pub(super) type algorithm_number = u32;
pub(super) type transport_number = u32;

/// The type with this number.
pub(super) fn dtype(number: dtype_number) -> Result<DType> {
    DType::from_number(number).ok_or_else(|| {
        Error::invalid_argument(format!("dtype {number} is none; there are 0 to 11"))
    })
}

/// The collective with this number, and whether it is the sending side of a send/recv.
pub(super) fn collective(number: collective_number) -> Result<(Collective, bool)> {
    let receives = cinch_collective_t::CINCH_RECV as u32;
    match Collective::from_number(number) {
        Some(collective) => Ok((collective, true)),
        None if number == receives => Ok((Collective::SendRecv, false)),
        None => Err(Error::invalid_argument(format!(
            "collective {number} is none; there are 0 to {receives}"
        ))),
    }
}

/// A setting by number: not set, automatic, or one of a list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NumberedSetting<T> {
    Unset,
    Auto,
    One(T),
}

/// The algorithm setting with this number.
pub(super) fn algorithm(number: algorithm_number) -> Result<NumberedSetting<Algorithm>> {
    choice("algorithm", number, &Algorithm::ALL)
}

/// The transport setting with this number.
pub(super) fn transport(number: transport_number) -> Result<NumberedSetting<TransportKind>> {
    choice("transport", number, &TransportKind::ALL)
}

fn choice<T: Copy>(what: &str, number: u32, all: &[T]) -> Result<NumberedSetting<T>> {
    match number {
        0 => Ok(NumberedSetting::Unset),
        1 => Ok(NumberedSetting::Auto),
        _ => match all.get(number as usize - 2) {
            Some(&one) => Ok(NumberedSetting::One(one)),
            None => Err(Error::invalid_argument(format!(
                "{what} {number} is none; there are 0 to {}",
                all.len() + 1
            ))),
        },
    }
}

/// The number of an algorithm in reports.
pub(super) fn algorithm_of(algorithm: Algorithm) -> algorithm_number {
    algorithm as u32 + 2
}

/// The number of a transport in reports.
pub(super) fn transport_of(transport: Option<TransportKind>) -> transport_number {
    transport.map_or(0, |kind| kind as u32 + 2)
}

/// Bytes of one element of `dtype`, to `*size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_dtype_size(
    dtype: dtype_number,
    size: *mut usize,
) -> super::error::cinch_result_t {
    guard!("cinch_dtype_size", {
        let bytes = self::dtype(dtype)?.size();
        // SAFETY: NULL or writable, by the documented contract.
        unsafe { super::handle::store("size", size, bytes) }
    })
}

#[cfg(test)]
mod tests {
    use super::cinch_algorithm_t::*;
    use super::cinch_collective_t::*;
    use super::cinch_dtype_t::*;
    use super::cinch_op_t::*;
    use super::cinch_transport_t::*;
    use super::*;
    use crate::types::ReduceOp;

    #[test]
    fn header_numbers_name_the_same_things() {
        for (number, name) in [
            (CINCH_I8, "i8"),
            (CINCH_U8, "u8"),
            (CINCH_I32, "i32"),
            (CINCH_U32, "u32"),
            (CINCH_I64, "i64"),
            (CINCH_U64, "u64"),
            (CINCH_F16, "f16"),
            (CINCH_F32, "f32"),
            (CINCH_F64, "f64"),
            (CINCH_BF16, "bf16"),
            (CINCH_F8E4M3, "f8e4m3"),
            (CINCH_F8E5M2, "f8e5m2"),
        ] {
            assert_eq!(dtype(number as u32).unwrap().name(), name);
        }
        assert!(dtype(DType::ALL.len() as u32).is_err());
        for (number, op) in [
            (CINCH_SUM, ReduceOp::Sum),
            (CINCH_PROD, ReduceOp::Prod),
            (CINCH_MAX, ReduceOp::Max),
            (CINCH_MIN, ReduceOp::Min),
            (CINCH_AVG, ReduceOp::Avg),
        ] {
            assert_eq!(number as u32, u32::from(op.number()));
        }
        for (number, name) in [
            (CINCH_ALL_REDUCE, "all_reduce"),
            (CINCH_ALL_GATHER, "all_gather"),
            (CINCH_REDUCE_SCATTER, "reduce_scatter"),
            (CINCH_BROADCAST, "broadcast"),
            (CINCH_REDUCE, "reduce"),
            (CINCH_GATHER, "gather"),
            (CINCH_SCATTER, "scatter"),
            (CINCH_ALL_TO_ALL, "all_to_all"),
            (CINCH_SEND, "send_recv"),
            (CINCH_RECV, "send_recv"),
        ] {
            let (collective, sends) = collective(number as u32).unwrap();
            assert_eq!(collective.name(), name);
            assert_eq!(sends, number as u32 != CINCH_RECV as u32);
        }
        assert!(collective(10).is_err() && collective(u32::MAX).is_err());
    }

    #[test]
    fn choices_survive_the_round_trip() {
        for (number, name) in [
            (CINCH_ALGORITHM_RING, "ring"),
            (CINCH_ALGORITHM_TREE, "tree"),
            (CINCH_ALGORITHM_ONESHOT, "oneshot"),
            (CINCH_ALGORITHM_DIRECT, "direct"),
            (CINCH_ALGORITHM_HIERARCHICAL, "hierarchical"),
        ] {
            let NumberedSetting::One(found) = algorithm(number as u32).unwrap() else {
                panic!("{name} is not a choice");
            };
            assert_eq!((found.name(), algorithm_of(found)), (name, number as u32));
        }
        for (number, name) in [
            (CINCH_TRANSPORT_LOOPBACK, "loopback"),
            (CINCH_TRANSPORT_SHM, "shm"),
            (CINCH_TRANSPORT_TCP, "tcp"),
            (CINCH_TRANSPORT_CUDA, "cuda"),
            (CINCH_TRANSPORT_RDMA, "rdma"),
        ] {
            let NumberedSetting::One(found) = transport(number as u32).unwrap() else {
                panic!("{name} is not a choice");
            };
            assert_eq!(found.name(), name);
            assert_eq!(transport_of(Some(found)), number as u32);
        }
        assert_eq!(transport_of(None), CINCH_TRANSPORT_UNSET as u32);
        assert_eq!(
            algorithm(CINCH_ALGORITHM_UNSET as u32).unwrap(),
            NumberedSetting::Unset
        );
        assert_eq!(
            algorithm(CINCH_ALGORITHM_AUTO as u32).unwrap(),
            NumberedSetting::Auto
        );
        assert_eq!(
            transport(CINCH_TRANSPORT_AUTO as u32).unwrap(),
            NumberedSetting::Auto
        );
        let unknown = TransportKind::ALL.len() as u32 + 2;
        assert!(algorithm(7).is_err() && transport(unknown).is_err());
    }
}
