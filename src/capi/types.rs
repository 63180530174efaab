//! Numbers of cinch.h for element types, operators, collectives, algorithms and transports.
//!
//! The enums exist for the header only. C passes plain integers (the `_number` aliases, which the
//! header prints as the enums), because a wrong number in a Rust enum is undefined behaviour.

use super::core::arguments::store;
use super::core::collective_request::ArgumentNames;
use super::error::cinch_result_t;
use crate::error::{Error, Result};
use crate::types::{Algorithm, Collective, DType, TransportKind};

/// Version of the structs' fields, which the `cinch_*_default` macros pass to the library.
pub const CINCH_API_VERSION: u32 = 1;

/// Major version of this header; `cinch_version` returns that of the loaded library.
#[allow(dead_code)] // for the header and the tests
pub const CINCH_VERSION_MAJOR: u32 = 0;
/// Minor version of this header. Before version 1.0 a new minor version may change the ABI, and with it the
/// soname.
#[allow(dead_code)] // for the header and the tests
pub const CINCH_VERSION_MINOR: u32 = 1;
/// Patch version of this header.
#[allow(dead_code)] // for the header and the tests
pub const CINCH_VERSION_PATCH: u32 = 0;

/// Type of one element. The numbers equal those of `ncclDataType_t`.
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
    /// 16-bit float, IEEE binary16.
    CINCH_F16 = 6,
    /// 32-bit float, IEEE binary32.
    CINCH_F32 = 7,
    /// 64-bit float, IEEE binary64.
    CINCH_F64 = 8,
    /// 16-bit float, bfloat16: the upper half of a binary32.
    CINCH_BF16 = 9,
    /// 8-bit float of OCP with 4 exponent and 3 mantissa bits, without infinity.
    CINCH_F8E4M3 = 10,
    /// 8-bit float of OCP with 5 exponent and 2 mantissa bits.
    CINCH_F8E5M2 = 11,
}

/// Reduction operator. The first five numbers equal those of `ncclRedOp_t`;
/// `cinch_op_create_premulsum` returns numbers from `CINCH_OP_FIRST_CREATED`.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_op_t {
    /// Sum; integers wrap.
    CINCH_SUM = 0,
    /// Product; integers wrap.
    CINCH_PROD = 1,
    /// Maximum; NaN if any contribution is NaN.
    CINCH_MAX = 2,
    /// Minimum; NaN if any contribution is NaN.
    CINCH_MIN = 3,
    /// Average of floats: the sum divided once by the number of ranks. It does not overflow for elements of 16
    /// and 8 bits. Integers are an error, because their sum may wrap before the division.
    CINCH_AVG = 4,
    /// First number of created operators; not itself an operator.
    CINCH_OP_FIRST_CREATED = 16,
}

/// Collective of a `cinch_call`.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_collective_t {
    /// See `cinch_all_reduce`.
    CINCH_ALL_REDUCE = 0,
    /// See `cinch_all_gather`.
    CINCH_ALL_GATHER = 1,
    /// See `cinch_reduce_scatter`.
    CINCH_REDUCE_SCATTER = 2,
    /// See `cinch_broadcast`.
    CINCH_BROADCAST = 3,
    /// See `cinch_reduce`.
    CINCH_REDUCE = 4,
    /// See `cinch_gather`.
    CINCH_GATHER = 5,
    /// See `cinch_scatter`.
    CINCH_SCATTER = 6,
    /// See `cinch_all_to_all`.
    CINCH_ALL_TO_ALL = 7,
    /// See `cinch_send`.
    CINCH_SEND = 8,
    /// See `cinch_recv`.
    CINCH_RECV = 9,
}

/// Algorithm of a collective.
// The header has a constant for each line of the table of `Algorithm`; its number is the line's plus 2.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_algorithm_t {
    /// Unset: a call uses the communicator's setting, a communicator that of the environment.
    CINCH_ALGORITHM_UNSET = 0,
    /// The cheapest by the cost model, and overrides the environment. For configs only.
    CINCH_ALGORITHM_AUTO = 1,
}

/// Transport between two ranks.
// The header has a constant for each line of the table of `TransportKind`; its number is the line's plus 2.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_transport_t {
    /// In a config: unset, the environment decides. In a report: no data moved.
    CINCH_TRANSPORT_UNSET = 0,
    /// The fastest that connects each pair, and overrides the environment. For configs only.
    CINCH_TRANSPORT_AUTO = 1,
}

pub(super) type dtype_number = u32;
pub(super) type op_number = u32;
pub(super) type collective_number = u32;
pub(super) type algorithm_number = u32;
pub(super) type transport_number = u32;

/// Names of cinch.h for error sentences about a collective's arguments.
pub(super) const ARGUMENT_NAMES: ArgumentNames = ArgumentNames {
    sendbuf: "sendbuf",
    recvbuf: "recvbuf",
    dtype: "dtype",
    dtypes: [(DType::I8, "CINCH_I8"), (DType::F8E5M2, "CINCH_F8E5M2")],
    host_stream: "pass NULL, or join with the device set",
};

/// Returns the collective with this number. For a send/recv the second value is whether the caller
/// sends.
///
/// # Errors
/// Invalid argument if there is none.
pub(super) fn collective(number: collective_number) -> Result<(Collective, bool)> {
    let recv = cinch_collective_t::CINCH_RECV as u32;
    if number == recv {
        return Ok((Collective::SendRecv, false));
    }
    // `CINCH_RECV` takes a number of its own, so later collectives have C numbers higher by 1.
    let place = number - u32::from(number > recv);
    Collective::from_number(place).map(|collective| (collective, true)).ok_or_else(|| {
        let last = Collective::ALL.len() as u32;
        let name = match last == recv {
            true => "RECV".into(),
            false => Collective::ALL[last as usize - 1].name().to_uppercase(),
        };
        Error::invalid_argument(format!(
            "collective {number} is unknown; valid: 0 (CINCH_ALL_REDUCE) to {last} (CINCH_{name})"
        ))
    })
}

/// A setting that C passes as a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NumberedSetting<T> {
    Unset,
    Auto,
    One(T),
}

impl<T: Copy> NumberedSetting<T> {
    /// Returns the setting with this number: 0 is unset, 1 automatic, and from 2 on the elements of
    /// `all` in order.
    fn new(what: &str, number: u32, all: &[T]) -> Result<NumberedSetting<T>> {
        match number {
            0 => Ok(NumberedSetting::Unset),
            1 => Ok(NumberedSetting::Auto),
            _ => match all.get(number as usize - 2) {
                Some(&one) => Ok(NumberedSetting::One(one)),
                None => Err(Error::invalid_argument(format!(
                    "{what} {number} is unknown; valid: 0 (unset) to {}",
                    all.len() + 1
                ))),
            },
        }
    }
}

/// Returns the algorithm setting with this number.
///
/// # Errors
/// Invalid argument if there is none.
pub(super) fn algorithm(number: algorithm_number) -> Result<NumberedSetting<Algorithm>> {
    NumberedSetting::new("algorithm", number, &Algorithm::ALL)
}

/// Returns the transport setting with this number.
///
/// # Errors
/// Invalid argument if there is none.
pub(super) fn transport(number: transport_number) -> Result<NumberedSetting<TransportKind>> {
    NumberedSetting::new("transport", number, &TransportKind::ALL)
}

/// Returns the number that stands for `algorithm` in reports.
pub(super) fn algorithm_of(algorithm: Algorithm) -> algorithm_number {
    algorithm as u32 + 2
}

/// Returns the number that stands for `transport` in reports; 0 if no data moved.
pub(super) fn transport_of(transport: Option<TransportKind>) -> transport_number {
    transport.map_or(0, |kind| kind as u32 + 2)
}

/// Stores the bytes of one element of `dtype` in `*size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_dtype_size(dtype: dtype_number, size: *mut usize) -> cinch_result_t {
    guard!("cinch_dtype_size", {
        let bytes = ARGUMENT_NAMES.dtype(dtype.into())?.size();
        // SAFETY: cinch.h requires of the program that `size` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("size", size, bytes) }
    })
}

#[cfg(test)]
mod tests {
    use super::cinch_algorithm_t::*;
    use super::cinch_collective_t::*;
    use super::cinch_op_t::*;
    use super::cinch_transport_t::*;
    use super::*;
    use crate::types::ReduceOp;

    /// Returns the name of an element type's constant in cinch.h.
    fn constant(dtype: DType) -> String {
        format!("CINCH_{}", dtype.name().to_uppercase())
    }

    #[test]
    fn header_has_every_element_type_with_its_number() {
        let header = include_str!("../../include/cinch.h");
        let values = header
            .split_once("enum cinch_dtype_t")
            .and_then(|(_, rest)| Some(rest.split_once('}')?.0))
            .expect("an enum of element types");
        let lines: Vec<&str> = values.lines().map(str::trim).collect();
        let declared: Vec<&str> = lines
            .into_iter()
            .filter(|line| line.starts_with("CINCH_"))
            .collect();
        let expected = DType::ALL.map(|dtype| format!("{} = {},", constant(dtype), dtype as u8));
        assert_eq!(declared, expected);
    }

    #[test]
    fn unknown_element_type_is_an_error_that_names_the_valid_ones() {
        for dtype in DType::ALL {
            assert_eq!(ARGUMENT_NAMES.dtype(dtype as i64).unwrap(), dtype);
        }
        let last = DType::ALL[DType::ALL.len() - 1];
        for number in [-1, DType::ALL.len() as i64] {
            let error = ARGUMENT_NAMES.dtype(number).unwrap_err();
            let valid = format!(
                "is unknown; valid: 0 (CINCH_I8) to {} ({})",
                last as u8,
                constant(last)
            );
            assert!(error.message().ends_with(&valid), "{error}");
        }
    }

    #[test]
    fn number_of_header_has_the_meaning_of_its_name() {
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
        let beyond = Collective::ALL.len() as u32 + 1;
        assert!(collective(beyond).is_err() && collective(u32::MAX).is_err());
    }

    #[test]
    fn numbered_setting_survives_round_trip() {
        for one in Algorithm::ALL {
            let setting = algorithm(algorithm_of(one)).unwrap();
            assert_eq!(setting, NumberedSetting::One(one));
        }
        for kind in TransportKind::ALL {
            let setting = transport(transport_of(Some(kind))).unwrap();
            assert_eq!(setting, NumberedSetting::One(kind));
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
        assert!(algorithm(Algorithm::ALL.len() as u32 + 2).is_err());
        assert!(transport(TransportKind::ALL.len() as u32 + 2).is_err());
    }
}
