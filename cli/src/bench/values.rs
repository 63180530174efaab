//! Values of the options of `cinch bench`, and their parsers.

use cinch::types::{CodecSetting, Scalar, TransportKind};
use cinch::{Algorithm, Collective, DType, ReduceOp};

/// Parses hosts and ranks of each host, such as `4096x8`.
pub fn parse_hosts(text: &str) -> Result<(usize, usize), String> {
    let number = |text: &str| text.parse::<usize>().ok().filter(|&number| number > 0);
    text.split_once('x')
        .and_then(|(hosts, ranks)| Some((number(hosts)?, number(ranks)?)))
        .filter(|(hosts, ranks)| hosts.saturating_mul(*ranks) <= 1 << 20)
        .ok_or_else(|| "must be HOSTSxRANKS: two numbers from 1, with at most 1048576 ranks".into())
}

/// An option's value, or `None` for `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named<T>(pub Option<T>);

/// Element types to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Types {
    /// Element types in the given order.
    pub list: Vec<DType>,
    /// Whether the option is `all`. Combinations that do not exist are then left out instead of
    /// refused.
    pub all: bool,
}

/// Reductions to run. The factor of `mulsum` is filled in by each rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Ops {
    /// Reductions in the given order.
    pub list: Vec<ReduceOp>,
    /// Whether the option is `all`; see [`Types::all`].
    pub all: bool,
}

/// Root ranks to run; `All` runs each rank in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Root {
    /// A single root rank.
    One(usize),
    /// Each rank in turn.
    All,
}

/// Parses a byte count as settings do, up to 64 T.
pub fn parse_size(text: &str) -> Result<usize, String> {
    match cinch::config::parse_bytes(text)? {
        bytes if bytes <= 1 << 46 => Ok(bytes),
        _ => Err("must be at most 64T bytes".into()),
    }
}

/// Parses the name of a collective, with or without `_` and `-`.
pub fn parse_collective(text: &str) -> Result<Collective, String> {
    let plain = text.to_ascii_lowercase().replace(['_', '-'], "");
    Collective::ALL
        .into_iter()
        .find(|collective| collective.name().replace('_', "") == plain)
        .ok_or_else(|| {
            let names: Vec<_> = Collective::ALL.iter().map(|c| c.name()).collect();
            format!("valid: {}", names.join(", "))
        })
}

/// Parses names of element types, separated by commas, or `all`.
pub fn parse_datatypes(text: &str) -> Result<Types, String> {
    if text == "all" {
        return Ok(Types {
            list: DType::ALL.to_vec(),
            all: true,
        });
    }
    let list = text.split(',').map(parse_datatype);
    Ok(Types {
        list: list.collect::<Result<_, _>>()?,
        all: false,
    })
}

/// Returns the help of `--datatype`.
pub fn datatype_help() -> String {
    let names = DType::ALL.map(DType::name).join(" ");
    format!("Element types: {names}, with commas, or all [default: f32, or that of --data]")
}

/// Parses the name of an element type, as cinch or nccl-tests writes it.
pub fn parse_datatype(text: &str) -> Result<DType, String> {
    // Besides cinch's type names, the type names of nccl-tests are accepted.
    let name = match text {
        "int8" => "i8",
        "uint8" => "u8",
        "int32" | "int" => "i32",
        "uint32" => "u32",
        "int64" => "i64",
        "uint64" => "u64",
        "half" | "float16" => "f16",
        "float" | "float32" => "f32",
        "double" | "float64" => "f64",
        "bfloat16" => "bf16",
        "fp8_e4m3" => "f8e4m3",
        "fp8_e5m2" => "f8e5m2",
        other => other,
    };
    DType::from_name(name).ok_or_else(|| {
        let names: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("valid: {}, all", names.join(", "))
    })
}

/// Parses the name of a reduction, or `all`.
pub fn parse_ops(text: &str) -> Result<Ops, String> {
    let every = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::PreMulSum(Scalar::Float(1.0)),
    ];
    if text == "all" {
        return Ok(Ops {
            list: every.to_vec(),
            all: true,
        });
    }
    let name = if text == "mulsum" { "premulsum" } else { text };
    match every.into_iter().find(|op| op.name() == name) {
        Some(op) => Ok(Ops {
            list: vec![op],
            all: false,
        }),
        None => Err("valid: sum, prod, min, max, avg, mulsum, all".into()),
    }
}

/// Parses a root rank, or `all`.
pub fn parse_root(text: &str) -> Result<Root, String> {
    match text {
        "all" | "-1" => Ok(Root::All),
        _ => text
            .parse()
            .map(Root::One)
            .map_err(|_| "valid: a rank, or all".into()),
    }
}

/// Returns the help of `--transport`, with the names of the transports.
pub fn transport_help() -> String {
    format!(
        "Transport of the data: auto, {}",
        TransportKind::ALL.map(TransportKind::name).join(", ")
    )
}

/// Returns the help of `--algo`, with the names of the algorithms.
pub fn algorithm_help() -> String {
    format!(
        "Schedule: auto, {}",
        Algorithm::ALL.map(Algorithm::name).join(", ")
    )
}

/// Parses the name of a transport, or `auto`.
pub fn parse_transport(text: &str) -> Result<Named<TransportKind>, String> {
    parse_named(text, &TransportKind::ALL, TransportKind::name)
}

/// Parses the name of an algorithm, or `auto`.
pub fn parse_algorithm(text: &str) -> Result<Named<Algorithm>, String> {
    parse_named(text, &Algorithm::ALL, Algorithm::name)
}

/// Parses `auto` or the name of a member of `all`; the error lists the names.
fn parse_named<T: Copy>(
    text: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<Named<T>, String> {
    if text == "auto" {
        return Ok(Named(None));
    }
    let found = all.iter().copied().find(|&member| name(member) == text);
    let names: Vec<_> = all.iter().map(|&member| name(member)).collect();
    found
        .map(|member| Named(Some(member)))
        .ok_or_else(|| format!("valid: auto, {}", names.join(", ")))
}

/// Parses a codec setting.
pub fn parse_codec(text: &str) -> Result<CodecSetting, String> {
    text.parse()
        .map_err(|error: cinch::Error| error.message().to_string())
}

/// Parses a number of seconds above 0 and up to 1,000,000.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e6 => Ok(seconds),
        _ => Err("must be a number of seconds above 0 and up to 1000000".into()),
    }
}
