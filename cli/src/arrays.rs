//! `cinch arrays`: measures codecs on arrays in GPU memory, and compressed copies between GPU and
//! host. Each figure stands beside a plain copy from the same run.

use super::bench::metrics;
use super::bench::output::Output;
use super::bench::record::RunInfo;
use super::bench::values::{parse_datatype, parse_size};
use super::bench::verify::POISON;
use super::{ExitResult, FAILURE, USAGE, WRONG};
use cinch::arrays::{
    CodecKernels, CopyTarget, DeviceCodec, Elements, HostCopier, Layout, StandAlone,
};
use cinch::codec::KERNEL_CODECS;
use cinch::cpu::Isa;
use cinch::gpu::{Context, Device, DeviceMemory, Driver, Event, PinnedMemory, Stream};
use cinch::reduce::{narrow, widen};
use cinch::testing::{gaussian, random_word};
use cinch::{CodecSpec, DType, Error, Result};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of each wait for the GPU.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of random elements; larger arrays repeat them.
const PERIOD: usize = 1 << 20;
/// Measurements per figure; the median is reported.
const TURNS: usize = 7;
/// Kernel launches between two timing events.
const LAUNCHES: usize = 5;

#[derive(clap::Args)]
pub struct ArraysOptions {
    /// Bytes of elements to process, a multiple of 4K
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = parse_bytes, default_value = "256M")]
    bytes: usize,
    /// Codecs to run on GPU memory [default: all with GPU kernels]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    codec: Vec<String>,
    /// Codecs of the compressed copies between GPU and host
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "trunc16"
    )]
    copy: Vec<String>,
    /// Element types: f32, f16, bf16
    #[arg(
        short = 'd',
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "f32,bf16"
    )]
    datatype: Vec<String>,
    /// Threads that compress; 0: as many as there are cores, at most 16
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// CUDA device number
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Write each row as a JSON object on a line of its own
    #[arg(long, value_name = "FILE.jsonl")]
    json: Option<PathBuf>,
}

fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    match parse_size(text)? {
        bytes if bytes > 0 && bytes.is_multiple_of(4096) => Ok(bytes),
        _ => Err("must be a multiple of 4K, at least 4K".into()),
    }
}

impl ArraysOptions {
    /// Returns the element types, or an error for types that codecs do not take.
    fn types(&self) -> std::result::Result<Vec<DType>, String> {
        let parse = |name: &String| match parse_datatype(name)? {
            dtype if dtype.has_codecs() => Ok(dtype),
            other => Err(format!(
                "-d {other}: codecs take f32, f16 and bf16; name one of these"
            )),
        };
        self.datatype.iter().map(parse).collect()
    }
}

/// Prints both tables and returns the exit code.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn main(options: &ArraysOptions) -> ExitResult {
    let bad = |error: Error| (USAGE, error.to_string());
    let types = options.types().map_err(|sentence| (USAGE, sentence))?;
    let parse = |texts: &[String]| -> ExitResult<Vec<CodecSpec>> {
        texts.iter().map(|text| text.parse().map_err(bad)).collect()
    };
    let mut codecs = parse(&options.codec)?;
    if codecs.is_empty() {
        codecs = KERNEL_CODECS.map(CodecSpec::of).into();
    }
    let copies = parse(&options.copy)?;
    let failed = |error: Error| (FAILURE, error.to_string());
    let bench = ArraysBench::new(options).map_err(failed)?;
    let gpus = bench.context.driver().device_count().map_err(failed)?;
    let run = RunInfo::on_gpus(bench.context.device(), gpus);
    // An existing file is replaced only after a GPU was found, so that a failed start keeps its
    // rows.
    let mut rows = Output::of_rows(options.json.clone()).map_err(bad)?;
    let mut wrong = 0;
    let mut report =
        |rows: &mut Output, spec: CodecSpec, dtype: DType, row: (ArraysFigures, bool)| {
            let (figures, right) = row;
            wrong += usize::from(!right);
            let mark = if right { "" } else { "  WRONG" };
            let (codec, datatype) = (spec.to_string(), dtype.to_string());
            rows.line(&format!(
                "{codec:<16} {datatype:<5} {}{mark}",
                figures.cells()
            ));
            rows.record(&ArraysRecord {
                codec,
                datatype,
                bytes: bench.bytes,
                right,
                figures,
                run: run.clone(),
            })
        };
    rows.line(&format!(
        "# {}, {} bytes of elements; bytes read and written a second, of copy: beside a copy in \
         device memory\n\
         codec            type   wire%   encode GB/s  of copy   decode GB/s  of copy",
        bench.context.device(),
        options.bytes
    ));
    for &dtype in &types {
        let values = bench.fill(dtype).map_err(failed)?;
        for &spec in &codecs {
            let row = bench.device_row(spec, dtype, &values).map_err(failed)?;
            report(&mut rows, spec, dtype, row).map_err(failed)?;
        }
    }
    rows.line(&format!(
        "# packed copies by {} threads on {} cores; bytes of elements a second, of plain: beside a \
         copy from and to pinned memory; to 4: to four arrays, beside four copies; packing: those threads without a GPU\n\
         codec            type   to GPU GB/s  of plain   to host GB/s  of plain    to 4 GB/s  of plain   packing GB/s",
        bench.threads,
        std::thread::available_parallelism().map_or(1, usize::from)
    ));
    for &dtype in &types {
        for &spec in &copies {
            // `copy_row` overwrites the elements in GPU memory with decoded ones, so each codec
            // gets fresh elements.
            let values = bench.fill(dtype).map_err(failed)?;
            let row = bench.copy_row(spec, dtype, &values).map_err(failed)?;
            report(&mut rows, spec, dtype, row).map_err(failed)?;
        }
    }
    rows.end().map_err(failed)?;
    Ok(if wrong > 0 { WRONG } else { 0 })
}

struct ArraysBench {
    context: Arc<Context>,
    kernels: Arc<CodecKernels>,
    copier: HostCopier,
    stream: Stream,
    /// Room for twice the elements: decoded elements go to the second half.
    elements: DeviceMemory,
    wire: DeviceMemory,
    pinned: PinnedMemory,
    marks: [Event; 2],
    bytes: usize,
    threads: usize,
}

/// A line of the `--json` file.
#[derive(Serialize)]
struct ArraysRecord {
    codec: String,
    datatype: String,
    /// Bytes of the elements.
    bytes: usize,
    /// Whether every element has the bits that the codec produces on the host.
    right: bool,
    #[serde(flatten)]
    figures: ArraysFigures,
    /// Machine, versions, date and command.
    run: RunInfo,
}

/// Measured rates, in 10^9 bytes a second, and their ratios to a plain copy in the same run.
#[derive(Serialize)]
#[serde(tag = "work", rename_all = "snake_case")]
enum ArraysFigures {
    /// A codec on GPU memory. Rates count the bytes read plus the bytes written.
    Array {
        /// Encoded bytes in percent of the elements' bytes.
        wire_percent: f64,
        encode_gb_per_s: f64,
        decode_gb_per_s: f64,
        copy_gb_per_s: f64,
        encode_ratio: f64,
        decode_ratio: f64,
    },
    /// A compressed copy between host and GPU. Rates count the bytes of the elements.
    PackedCopy {
        /// Host threads that compress.
        threads: usize,
        to_gpu_gb_per_s: f64,
        to_host_gb_per_s: f64,
        plain_to_gpu_gb_per_s: f64,
        plain_to_host_gb_per_s: f64,
        to_gpu_ratio: f64,
        to_host_ratio: f64,
        /// A copy of the same elements to four arrays on the GPU, beside four plain copies. Rates count the bytes of all
        /// arrays.
        to_four_gb_per_s: f64,
        plain_to_four_gb_per_s: f64,
        to_four_ratio: f64,
        /// Rate at which the same threads encode fp32 without a GPU, in 10^9 bytes of elements a
        /// second.
        packing_gb_per_s: f64,
    },
}

impl ArraysFigures {
    /// Converts a codec's rates from bytes a second.
    fn array(wire_percent: f64, [encode, decode, copy]: [f64; 3]) -> ArraysFigures {
        ArraysFigures::Array {
            wire_percent,
            encode_gb_per_s: encode / 1e9,
            decode_gb_per_s: decode / 1e9,
            copy_gb_per_s: copy / 1e9,
            encode_ratio: encode / copy,
            decode_ratio: decode / copy,
        }
    }

    /// Converts the rates of compressed copies, plain copies and host encoding from bytes a second.
    fn packed_copy(
        threads: usize,
        [
            to_gpu,
            to_host,
            plain_to_gpu,
            plain_to_host,
            to_four,
            plain_to_four,
        ]: [f64; 6],
        packing: f64,
    ) -> ArraysFigures {
        ArraysFigures::PackedCopy {
            threads,
            to_gpu_gb_per_s: to_gpu / 1e9,
            to_host_gb_per_s: to_host / 1e9,
            plain_to_gpu_gb_per_s: plain_to_gpu / 1e9,
            plain_to_host_gb_per_s: plain_to_host / 1e9,
            to_gpu_ratio: to_gpu / plain_to_gpu,
            to_host_ratio: to_host / plain_to_host,
            to_four_gb_per_s: to_four / 1e9,
            plain_to_four_gb_per_s: plain_to_four / 1e9,
            to_four_ratio: to_four / plain_to_four,
            packing_gb_per_s: packing / 1e9,
        }
    }

    /// Formats the table cells that follow the codec and type.
    fn cells(&self) -> String {
        match *self {
            ArraysFigures::Array {
                wire_percent,
                encode_gb_per_s: encode,
                decode_gb_per_s: decode,
                encode_ratio,
                decode_ratio,
                ..
            } => format!(
                "{wire_percent:>6.1} {encode:>12.0} {encode_ratio:>8.2} {decode:>13.0} {decode_ratio:>8.2}"
            ),
            ArraysFigures::PackedCopy {
                to_gpu_gb_per_s: to_gpu,
                to_host_gb_per_s: to_host,
                to_gpu_ratio,
                to_host_ratio,
                to_four_gb_per_s: to_four,
                to_four_ratio,
                packing_gb_per_s: packing,
                ..
            } => format!(
                "{to_gpu:>12.2} {to_gpu_ratio:>9.2} {to_host:>14.2} {to_host_ratio:>9.2} {to_four:>12.2} \
                 {to_four_ratio:>9.2} {packing:>14.2}"
            ),
        }
    }
}

impl ArraysBench {
    fn new(options: &ArraysOptions) -> Result<ArraysBench> {
        let context = Context::primary(&Device::at(&Driver::load()?, options.gpu)?)?;
        let bytes = options.bytes;
        Ok(ArraysBench {
            kernels: Arc::new(CodecKernels::new(&context)?),
            copier: HostCopier::new(&context, options.threads, WAIT_TIMEOUT)?,
            stream: Stream::new(&context)?,
            elements: DeviceMemory::new(&context, 2 * bytes)?,
            // Twice the elements' bytes are enough: no codec takes more than 3 bytes for a 16-bit element.
            wire: DeviceMemory::new(&context, 2 * bytes)?,
            pinned: PinnedMemory::new(&context, bytes)?,
            marks: [Event::timed(&context)?, Event::timed(&context)?],
            bytes,
            threads: match options.threads {
                0 => HostCopier::default_threads(),
                some => some,
            },
            context,
        })
    }

    /// Fills GPU memory with Gaussian elements and returns those of its first half as f32.
    fn fill(&self, dtype: DType) -> Result<Vec<f32>> {
        let count = PERIOD.min(self.bytes / dtype.size());
        let mut values: Vec<f32> = (0..count as u64)
            .map(|at| gaussian(random_word(0, at)) as f32)
            .collect();
        let mut bytes = vec![0; count * dtype.size()];
        narrow(dtype, Isa::Scalar, &values, &mut bytes);
        widen(dtype, Isa::Scalar, &bytes, &mut values);
        self.elements.write(0, &bytes, &self.stream, WAIT_TIMEOUT)?;
        self.elements.repeat(bytes.len(), &self.stream)?;
        self.stream.wait(WAIT_TIMEOUT)?;
        let all = self.bytes / dtype.size();
        Ok(values.into_iter().cycle().take(all).collect())
    }

    /// Returns the mean seconds of one launch, measured with CUDA events.
    fn seconds(&self, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
        self.marks[0].record(&self.stream)?;
        for _ in 0..LAUNCHES {
            launch()?;
        }
        self.marks[1].record(&self.stream)?;
        self.stream.wait(WAIT_TIMEOUT)?;
        Ok(self.marks[1].since(&self.marks[0])? / LAUNCHES as f64)
    }

    /// Measures a codec on GPU memory, and returns whether all elements are right.
    fn device_row(
        &self,
        spec: CodecSpec,
        dtype: DType,
        values: &[f32],
    ) -> Result<(ArraysFigures, bool)> {
        let codec = DeviceCodec::new(&self.kernels, spec, Layout::Chunk)?;
        let count = self.bytes / dtype.size();
        let wire = codec.bytes(count);
        let from = Elements {
            address: self.elements.address(),
            count,
            dtype,
        };
        let to = Elements {
            address: self.elements.address() + self.bytes as u64,
            ..from
        };
        let place = (self.wire.address(), self.wire.bytes());
        let mut times = [const { Vec::new() }; 3];
        // Encode, decode and copy alternate, so that all three run at the same GPU clock
        // frequencies.
        for turn in 0..TURNS + 1 {
            // SAFETY: `self` owns the memory, and `seconds` waits for every use of it.
            let (encode, decode) = unsafe {
                (
                    self.seconds(|| codec.encode(from, 0, place, &self.stream))?,
                    self.seconds(|| codec.decode(place, to, &self.stream))?,
                )
            };
            let copy = self.seconds(|| self.elements.repeat(self.bytes, &self.stream))?;
            // The first round only warms up.
            if turn > 0 {
                push_each(&mut times, [encode, decode, copy]);
            }
        }
        // The compared run overwrites poison. Results of earlier rounds thus cannot be mistaken for
        // results of this run.
        let mut found = vec![POISON; self.bytes];
        self.elements
            .write(self.bytes, &found, &self.stream, WAIT_TIMEOUT)?;
        self.wire.fill(POISON, &self.stream)?;
        // SAFETY: `self` owns the memory, and the read below waits for the stream.
        unsafe {
            codec.encode(from, 0, place, &self.stream)?;
            codec.decode(place, to, &self.stream)?;
        }
        self.elements
            .read(self.bytes, &mut found, &self.stream, WAIT_TIMEOUT)?;
        let moved = (self.bytes + wire) as f64;
        let [encode, decode, copy] = times.map(median);
        let copied = 2.0 * self.bytes as f64;
        let rates = [moved / encode, moved / decode, copied / copy];
        let wire_percent = 100.0 * wire as f64 / self.bytes as f64;
        let right = found == self.image(spec, dtype, values)?;
        Ok((ArraysFigures::array(wire_percent, rates), right))
    }

    /// Measures compressed copies to the GPU and back, and returns whether all elements are right.
    fn copy_row(
        &self,
        spec: CodecSpec,
        dtype: DType,
        values: &[f32],
    ) -> Result<(ArraysFigures, bool)> {
        let mut host = vec![0u8; self.bytes];
        self.elements
            .read(0, &mut host, &self.stream, WAIT_TIMEOUT)?;
        let original = host.clone();
        let address = self.elements.address();
        let more = DeviceMemory::new(&self.context, 3 * self.bytes)?;
        let mut times = [const { Vec::new() }; 6];
        let mut right = true;
        for turn in 0..TURNS + 1 {
            // Only the last round's result is compared, so results of earlier rounds are
            // overwritten.
            let is_last = turn == TURNS;
            if is_last {
                host.copy_from_slice(&original);
                self.elements.fill(POISON, &self.stream)?;
                self.stream.wait(WAIT_TIMEOUT)?;
            }
            let begin = Instant::now();
            // SAFETY: `self` owns the memory, and the wait below ends every use of it.
            unsafe {
                let stream = &self.stream;
                self.copier
                    .to_device(spec, dtype, 0, &host, address, stream)?;
            }
            self.stream.wait(WAIT_TIMEOUT)?;
            let to_gpu = begin.elapsed();
            let to_four = self.to_four(spec, dtype, &host, &more)?;
            let mut brought = Vec::new();
            if is_last {
                brought = self.image(spec, dtype, values)?;
                self.elements
                    .read(0, &mut host, &self.stream, WAIT_TIMEOUT)?;
                right &= host == brought;
                more.read(2 * self.bytes, &mut host, &self.stream, WAIT_TIMEOUT)?;
                right &= host == brought;
                host.fill(POISON);
            }
            let begin = Instant::now();
            // SAFETY: `self` owns the memory, and `to_host` returns only after `host` is written.
            unsafe {
                let stream = &self.stream;
                self.copier
                    .to_host(spec, dtype, 0, address, &mut host, stream)?;
            }
            let to_host = begin.elapsed();
            if is_last {
                let mut there = vec![0.0; values.len()];
                widen(dtype, Isa::Scalar, &brought, &mut there);
                right &= host == self.image(spec, dtype, &there)?;
            }
            // SAFETY: the allocation of `self.pinned` has `self.bytes` bytes, and nothing else uses
            // it meanwhile.
            let pinned =
                unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), self.bytes) };
            let [plain_to_gpu, plain_to_host] = self.plain(pinned)?;
            let plain_to_four = self.plain_to_four(pinned, &more)?;
            if turn == 0 {
                continue;
            }
            let turn = [
                to_gpu,
                to_host,
                plain_to_gpu,
                plain_to_host,
                to_four,
                plain_to_four,
            ];
            push_each(&mut times, turn.map(|time| time.as_secs_f64()));
        }
        let mut rates = times.map(|seconds| self.bytes as f64 / median(seconds));
        rates[4..].iter_mut().for_each(|rate| *rate *= 4.0);
        let packing = self.packing(spec)?;
        Ok((
            ArraysFigures::packed_copy(self.threads, rates, packing),
            right,
        ))
    }

    /// Copies pinned elements to the GPU and back without a codec, and returns both times.
    fn plain(&self, pinned: &mut [u8]) -> Result<[Duration; 2]> {
        let begin = Instant::now();
        self.elements
            .write(self.bytes, pinned, &self.stream, WAIT_TIMEOUT)?;
        let to_gpu = begin.elapsed();
        let begin = Instant::now();
        self.elements
            .read(self.bytes, pinned, &self.stream, WAIT_TIMEOUT)?;
        Ok([to_gpu, begin.elapsed()])
    }

    /// Copies elements to an array of the bench and three of `more` at once, and returns the time.
    fn to_four(
        &self,
        spec: CodecSpec,
        dtype: DType,
        host: &[u8],
        more: &DeviceMemory,
    ) -> Result<Duration> {
        let another = |at: u64| more.address() + at * self.bytes as u64;
        let targets = [self.elements.address(), another(0), another(1), another(2)];
        let targets = targets.map(|address| CopyTarget {
            copier: &self.copier,
            address,
            stream: &self.stream,
        });
        let begin = Instant::now();
        // SAFETY: `self` and `more` are the memory, and the wait below ends every use of it.
        unsafe { HostCopier::to_devices(spec, dtype, 0, host, &targets)? };
        self.stream.wait(WAIT_TIMEOUT)?;
        Ok(begin.elapsed())
    }

    /// Copies pinned elements to the same arrays without a codec, one after the other, and returns the time.
    fn plain_to_four(&self, pinned: &[u8], more: &DeviceMemory) -> Result<Duration> {
        let begin = Instant::now();
        self.elements
            .write(self.bytes, pinned, &self.stream, WAIT_TIMEOUT)?;
        for at in 0..3 {
            more.write(at * self.bytes, pinned, &self.stream, WAIT_TIMEOUT)?;
        }
        Ok(begin.elapsed())
    }

    /// Returns the rate at which the copier's host threads encode fp32 without a GPU, in bytes a
    /// second.
    fn packing(&self, spec: CodecSpec) -> Result<f64> {
        let codec = StandAlone::new(spec, Layout::Chunk, Isa::detect())?.with_threads(self.threads);
        let values = vec![1.5f32; self.bytes / 4];
        let mut wire = vec![0; codec.bytes(values.len())];
        let mut seconds = Vec::new();
        for _ in 0..TURNS {
            let begin = Instant::now();
            codec.encode(&values, 0, &mut wire)?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        Ok(self.bytes as f64 / median(seconds))
    }

    /// Encodes and decodes elements on the host and returns the bytes that a GPU must reproduce.
    fn image(&self, spec: CodecSpec, dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?.with_threads(self.threads);
        let mut wire = vec![0; host.bytes(values.len())];
        host.encode(values, 0, &mut wire)?;
        let mut decoded = vec![0f32; values.len()];
        host.decode(&wire, &mut decoded)?;
        let mut bytes = vec![0; values.len() * dtype.size()];
        narrow(dtype, Isa::Scalar, &decoded, &mut bytes);
        Ok(bytes)
    }
}

fn push_each<const N: usize>(lists: &mut [Vec<f64>; N], values: [f64; N]) {
    for (list, value) in lists.iter_mut().zip(values) {
        list.push(value);
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    metrics::median(&seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;
    use serde_json::Value;

    #[test]
    fn types_without_codecs_are_refused() {
        let types = |line: &str| parsed::<ArraysOptions>(line).unwrap().types();
        assert_eq!(types("-d f16,f32"), Ok(vec![DType::F16, DType::F32]));
        assert_eq!(types(""), Ok(vec![DType::F32, DType::BF16]));
        for other in ["f64", "i32", "u8", "f8e4m3"] {
            let sentence = types(&format!("-d f32,{other}")).unwrap_err();
            assert!(sentence.contains(other), "{sentence}");
        }
        assert!(types("-d f31").is_err());
    }

    #[test]
    fn record_names_work_machine_and_command() {
        let path = std::env::temp_dir().join(format!("cinch-arrays-{}", std::process::id()));
        let options: ArraysOptions = parsed(&format!("--json {}", path.display())).unwrap();
        let mut rows = Output::of_rows(options.json.clone()).unwrap();
        let array = ArraysFigures::array(26.5, [2e12, 3e12, 4e12]);
        let copy = ArraysFigures::packed_copy(8, [30e9, 20e9, 40e9, 50e9, 80e9, 40e9], 60e9);
        for (figures, right) in [(array, true), (copy, false)] {
            let record = ArraysRecord {
                codec: "linear8".into(),
                datatype: "f32".into(),
                bytes: 4096,
                right,
                figures,
                run: RunInfo::on_host(),
            };
            rows.record(&record).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let rows: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(rows.len(), 2);
        assert_eq!(
            (&rows[0]["work"], &rows[0]["right"]),
            (&"array".into(), &true.into())
        );
        assert_eq!(
            (&rows[1]["work"], &rows[1]["right"]),
            (&"packed_copy".into(), &false.into())
        );
        for (row, name, value) in [
            (0, "encode_gb_per_s", 2000.0),
            (0, "encode_ratio", 0.5),
            (0, "decode_ratio", 0.75),
            (1, "to_gpu_ratio", 0.75),
            (1, "to_host_ratio", 0.4),
            (1, "to_four_ratio", 2.0),
            (1, "packing_gb_per_s", 60.0),
        ] {
            assert_eq!(rows[row][name], value, "{name}");
        }
        for row in rows {
            assert_eq!(
                (&row["codec"], &row["bytes"]),
                (&"linear8".into(), &4096.into())
            );
            let run = &row["run"];
            assert!(run["command"].as_str().unwrap().starts_with("cinch "));
            assert_eq!(run["date"].as_str().unwrap().len(), "2026-11-22".len());
            assert!(run["machine"]["cores"].as_u64().unwrap() > 0);
        }
    }
}
