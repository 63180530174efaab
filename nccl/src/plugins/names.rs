//! NCCL's names and numbers of collectives, types, algorithms and protocols.

use super::abi::{ALGORITHMS, PROTOCOLS};
use cinch::types::{Algorithm, Protocol};
use cinch::{Collective, DType};
use std::ffi::{CStr, c_int};

/// Names of algorithms in the order of NCCL's numbers, for log lines.
pub(super) const ALGORITHM_NAMES: [&str; ALGORITHMS] = [
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
];
/// Names of protocols in the order of NCCL's numbers, for log lines.
pub(super) const PROTOCOL_NAMES: [&str; PROTOCOLS] = ["LL", "LL128", "SIMPLE"];

/// Returns the name of a collective; `sends` is true on the sending side of a message.
pub(super) fn func(collective: Collective, sends: bool) -> &'static CStr {
    match collective {
        Collective::AllReduce => c"AllReduce",
        Collective::AllGather => c"AllGather",
        Collective::ReduceScatter => c"ReduceScatter",
        Collective::Broadcast => c"Broadcast",
        Collective::Reduce => c"Reduce",
        Collective::Gather => c"Gather",
        Collective::Scatter => c"Scatter",
        Collective::AllToAll => c"AlltoAll",
        Collective::SendRecv if sends => c"Send",
        Collective::SendRecv => c"Recv",
    }
}

/// Returns the number of a collective that tuners know.
pub(super) fn tuned_func(collective: Collective) -> Option<c_int> {
    match collective {
        Collective::Broadcast => Some(0),
        Collective::Reduce => Some(1),
        Collective::AllGather => Some(2),
        Collective::ReduceScatter => Some(3),
        Collective::AllReduce => Some(4),
        _ => None,
    }
}

/// Returns the name of a type.
pub(super) fn datatype(dtype: DType) -> &'static CStr {
    match dtype {
        DType::I8 => c"ncclInt8",
        DType::U8 => c"ncclUint8",
        DType::I32 => c"ncclInt32",
        DType::U32 => c"ncclUint32",
        DType::I64 => c"ncclInt64",
        DType::U64 => c"ncclUint64",
        DType::F16 => c"ncclFloat16",
        DType::F32 => c"ncclFloat32",
        DType::F64 => c"ncclFloat64",
        DType::BF16 => c"ncclBfloat16",
        DType::F8E4M3 => c"ncclFloat8e4m3",
        DType::F8E5M2 => c"ncclFloat8e5m2",
    }
}

/// Returns the name of an algorithm: NCCL's name if it has the algorithm, else cinch's in NCCL's letters.
pub(super) fn algorithm(algorithm: Algorithm) -> &'static CStr {
    match algorithm {
        Algorithm::Ring => c"RING",
        Algorithm::Tree => c"TREE",
        Algorithm::OneShot => c"ONESHOT",
        Algorithm::Direct => c"DIRECT",
        Algorithm::Hierarchical => c"HIERARCHICAL",
        Algorithm::FlatTree => c"FLAT_TREE",
    }
}

/// Returns the name of a protocol.
pub(super) fn protocol(protocol: Protocol) -> &'static CStr {
    match protocol {
        Protocol::Simple => c"SIMPLE",
        Protocol::Ll => c"LL",
        Protocol::Ll128 => c"LL128",
    }
}

/// Returns the number of an algorithm that NCCL has, too.
pub(super) fn algorithm_number(algorithm: Algorithm) -> Option<usize> {
    match algorithm {
        Algorithm::Tree => Some(0),
        Algorithm::Ring => Some(1),
        _ => None,
    }
}

/// Returns the algorithm with NCCL's number; `None` if cinch does not have it.
pub(super) fn numbered_algorithm(number: usize) -> Option<Algorithm> {
    [Algorithm::Tree, Algorithm::Ring].get(number).copied()
}

/// Returns the number of a protocol.
pub(super) fn protocol_number(protocol: Protocol) -> usize {
    match protocol {
        Protocol::Ll => 0,
        Protocol::Ll128 => 1,
        Protocol::Simple => 2,
    }
}

/// Returns the protocol with NCCL's number.
pub(super) fn numbered_protocol(number: usize) -> Option<Protocol> {
    let protocols = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];
    protocols.get(number).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_belong_together() {
        for one in Algorithm::ALL {
            if let Some(number) = algorithm_number(one) {
                assert_eq!(numbered_algorithm(number), Some(one));
                let name = algorithm(one).to_str().unwrap();
                assert_eq!(ALGORITHM_NAMES[number], name);
            }
        }
        for one in Protocol::ALL {
            let name = protocol(one).to_str().unwrap();
            assert_eq!(PROTOCOL_NAMES[protocol_number(one)], name);
            assert_eq!(numbered_protocol(protocol_number(one)), Some(one));
        }
        assert_eq!(numbered_algorithm(2), None);
        assert_eq!(numbered_protocol(PROTOCOLS), None);
    }
}
