//! `cinch arrays`: how fast codecs are on arrays in a GPU's memory, and packed copies between it and
//! the host, beside plain copies in the same run.

use super::bench::metrics;
use super::bench::options::{parse_datatype, parse_size};
use super::bench::output::Output;
use super::bench::record::RunInfo;
use super::bench::verify::POISON;
use super::{ExitResult, FAILURE, USAGE, WRONG};
use cinch::arrays::{CodecKernels, DeviceCodec, Elements, HostCopier, Layout, StandAlone};
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

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Elements that are random before they repeat.
const PERIOD: usize = 1 << 20;
/// Turns of which the median counts.
const TURNS: usize = 7;
/// Launches between two events.
const LAUNCHES: usize = 5;

#[derive(clap::Args)]
pub struct ArraysOptions {
    /// Bytes of elements, a multiple of 4K
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = parse_bytes, default_value = "256M")]
    bytes: usize,
    /// Codecs of device memory; all unless named
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    codec: Vec<String>,
    /// Codecs of packed copies
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
    /// Threads that pack; 0: as many as there are cores, 16 at most
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// GPU
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Write each row as a JSON object on a line of its own
    #[arg(long, value_name = "FILE.jsonl")]
    json: Option<PathBuf>,
}

fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    match parse_size(text)? {
        bytes if bytes > 0 && bytes.is_multiple_of(4096) => Ok(bytes),
        _ => Err("a multiple of 4K, from 4K on".into()),
    }
}

impl ArraysOptions {
    /// Refuses what codecs take no elements of.
    fn types(&self) -> std::result::Result<Vec<DType>, String> {
        let parse = |name: &String| match parse_datatype(name)? {
            dtype @ (DType::F32 | DType::F16 | DType::BF16) => Ok(dtype),
            other => Err(format!(
                "-d {other}: codecs take f32, f16 and bf16; name one of these"
            )),
        };
        self.datatype.iter().map(parse).collect()
    }
}

/// Prints both tables.
///
/// # Errors
/// A code and a sentence: options that cannot be, failures, wrong elements.
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
    // Only now: earlier rows are not lost where there is no GPU.
    let mut rows = Output::of_rows(options.json.clone()).map_err(bad)?;
    let mut wrong = 0;
    let heads = "codec            type   wire%   encode GB/s  of copy   decode GB/s  of copy";
    rows.line(&format!(
        "# {}, {} bytes of elements; bytes read and written a second, of copy: beside a copy in \
         device memory\n{heads}",
        bench.context.device(),
        options.bytes
    ));
    for &dtype in &types {
        let values = bench.fill(dtype).map_err(failed)?;
        for &spec in &codecs {
            let row = bench.device_row(spec, dtype, &values).map_err(failed)?;
            wrong += usize::from(!row.right);
            rows.line(&format!(
                "{:<16} {:<5} {:>6.1} {:>12.0} {:>8.2} {:>13.0} {:>8.2}{}",
                spec.to_string(),
                dtype.to_string(),
                row.wire_percent,
                row.encode / 1e9,
                row.encode / row.copy,
                row.decode / 1e9,
                row.decode / row.copy,
                if row.right { "" } else { "  WRONG" }
            ));
            let record = ArraysRecord {
                codec: spec.to_string(),
                datatype: dtype.to_string(),
                bytes: bench.bytes,
                right: row.right,
                work: row.work(),
                run: run.clone(),
            };
            rows.record(&record).map_err(failed)?;
        }
    }
    let heads =
        "codec            type   to GPU GB/s  of plain   to host GB/s  of plain   packing GB/s";
    rows.line(&format!(
        "# packed copies by {} threads on {} cores; bytes of elements a second, of plain: beside a \
         copy from and to pinned memory; packing: those threads without a GPU\n{heads}",
        bench.threads,
        std::thread::available_parallelism().map_or(1, usize::from)
    ));
    for &dtype in &types {
        for &spec in &copies {
            // Anew: a copy leaves what the codec made of the elements.
            let values = bench.fill(dtype).map_err(failed)?;
            let row = bench.copy_row(spec, dtype, &values).map_err(failed)?;
            wrong += usize::from(!row.right);
            rows.line(&format!(
                "{:<16} {:<5} {:>12.2} {:>9.2} {:>14.2} {:>9.2} {:>14.2}{}",
                spec.to_string(),
                dtype.to_string(),
                row.there / 1e9,
                row.there / row.plain_there,
                row.back / 1e9,
                row.back / row.plain_back,
                row.packing / 1e9,
                if row.right { "" } else { "  WRONG" }
            ));
            let record = ArraysRecord {
                codec: spec.to_string(),
                datatype: dtype.to_string(),
                bytes: bench.bytes,
                right: row.right,
                work: row.work(bench.threads),
                run: run.clone(),
            };
            rows.record(&record).map_err(failed)?;
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
    /// Twice the elements, so that one half may be copied onto the other.
    elements: DeviceMemory,
    wire: DeviceMemory,
    pinned: PinnedMemory,
    marks: [Event; 2],
    bytes: usize,
    threads: usize,
}

struct DeviceRow {
    wire_percent: f64,
    /// Bytes a second, read and written.
    encode: f64,
    decode: f64,
    copy: f64,
    right: bool,
}

struct CopyRow {
    /// Bytes of elements a second.
    there: f64,
    back: f64,
    plain_there: f64,
    plain_back: f64,
    /// Bytes of fp32 a second that the threads alone encode, whatever the elements are.
    packing: f64,
    right: bool,
}

/// A row for machines.
#[derive(Serialize)]
struct ArraysRecord {
    codec: String,
    datatype: String,
    /// Bytes of elements.
    bytes: usize,
    /// Whether every element was what the host's codec makes of it.
    right: bool,
    #[serde(flatten)]
    work: ArraysFigures,
    /// Where, when and how.
    run: RunInfo,
}

/// Figures; rates in 10^9 bytes a second, ratios to a plain copy of the same run.
#[derive(Serialize)]
#[serde(tag = "work", rename_all = "snake_case")]
enum ArraysFigures {
    /// A codec on device memory: bytes read and written.
    Array {
        /// Encoded bytes, of 100 of elements.
        wire_percent: f64,
        encode_gb_per_s: f64,
        decode_gb_per_s: f64,
        copy_gb_per_s: f64,
        encode_ratio: f64,
        decode_ratio: f64,
    },
    /// Between host and GPU, packed: bytes of elements.
    PackedCopy {
        /// Threads that pack.
        threads: usize,
        to_gpu_gb_per_s: f64,
        to_host_gb_per_s: f64,
        plain_to_gpu_gb_per_s: f64,
        plain_to_host_gb_per_s: f64,
        to_gpu_ratio: f64,
        to_host_ratio: f64,
        packing_gb_per_s: f64,
    },
}

impl DeviceRow {
    fn work(&self) -> ArraysFigures {
        ArraysFigures::Array {
            wire_percent: self.wire_percent,
            encode_gb_per_s: self.encode / 1e9,
            decode_gb_per_s: self.decode / 1e9,
            copy_gb_per_s: self.copy / 1e9,
            encode_ratio: self.encode / self.copy,
            decode_ratio: self.decode / self.copy,
        }
    }
}

impl CopyRow {
    fn work(&self, threads: usize) -> ArraysFigures {
        ArraysFigures::PackedCopy {
            threads,
            to_gpu_gb_per_s: self.there / 1e9,
            to_host_gb_per_s: self.back / 1e9,
            plain_to_gpu_gb_per_s: self.plain_there / 1e9,
            plain_to_host_gb_per_s: self.plain_back / 1e9,
            to_gpu_ratio: self.there / self.plain_there,
            to_host_ratio: self.back / self.plain_back,
            packing_gb_per_s: self.packing / 1e9,
        }
    }
}

impl ArraysBench {
    fn new(options: &ArraysOptions) -> Result<ArraysBench> {
        let context = Context::primary(&Device::at(&Driver::load()?, options.gpu)?)?;
        let bytes = options.bytes;
        Ok(ArraysBench {
            kernels: Arc::new(CodecKernels::new(&context)?),
            copier: HostCopier::new(&context, options.threads, PATIENCE)?,
            stream: Stream::new(&context)?,
            elements: DeviceMemory::new(&context, 2 * bytes)?,
            // 8-bit codes of 16-bit elements, or 3 bytes of each.
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

    /// Gaussian elements throughout device memory; those of its first half, widened.
    fn fill(&self, dtype: DType) -> Result<Vec<f32>> {
        let count = PERIOD.min(self.bytes / dtype.size());
        let mut values: Vec<f32> = (0..count as u64)
            .map(|at| gaussian(random_word(0, at)) as f32)
            .collect();
        let mut bytes = vec![0; count * dtype.size()];
        narrow(dtype, Isa::Scalar, &values, &mut bytes);
        widen(dtype, Isa::Scalar, &bytes, &mut values);
        self.elements.write(0, &bytes, &self.stream, PATIENCE)?;
        self.elements.repeat(bytes.len(), &self.stream)?;
        self.stream.wait(PATIENCE)?;
        let all = self.bytes / dtype.size();
        Ok(values.into_iter().cycle().take(all).collect())
    }

    /// Returns the seconds of one of several launches, on the GPU's clock.
    fn seconds(&self, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
        self.marks[0].record(&self.stream)?;
        for _ in 0..LAUNCHES {
            launch()?;
        }
        self.marks[1].record(&self.stream)?;
        self.stream.wait(PATIENCE)?;
        Ok(self.marks[1].since(&self.marks[0])? / LAUNCHES as f64)
    }

    fn device_row(&self, spec: CodecSpec, dtype: DType, values: &[f32]) -> Result<DeviceRow> {
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
        let (mut encodes, mut decodes, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        // In turns, so that the clocks of the GPU are the same for all.
        for turn in 0..TURNS + 1 {
            // SAFETY: memory of this bench, every use of which `seconds` waits for.
            let (encode, decode) = unsafe {
                (
                    self.seconds(|| codec.encode(from, 0, place, &self.stream))?,
                    self.seconds(|| codec.decode(place, to, &self.stream))?,
                )
            };
            let copy = self.seconds(|| self.elements.repeat(self.bytes, &self.stream))?;
            // The first turn warms up.
            if turn > 0 {
                encodes.push(encode);
                decodes.push(decode);
                copies.push(copy);
            }
        }
        // Once more, over spoilt memory: what earlier turns or the copies have left counts for nothing.
        let mut found = vec![POISON; self.bytes];
        self.elements
            .write(self.bytes, &found, &self.stream, PATIENCE)?;
        self.wire.fill(POISON, &self.stream)?;
        // SAFETY: as above.
        unsafe {
            codec.encode(from, 0, place, &self.stream)?;
            codec.decode(place, to, &self.stream)?;
        }
        self.elements
            .read(self.bytes, &mut found, &self.stream, PATIENCE)?;
        let moved = (self.bytes + wire) as f64;
        Ok(DeviceRow {
            wire_percent: 100.0 * wire as f64 / self.bytes as f64,
            encode: moved / median(encodes),
            decode: moved / median(decodes),
            copy: 2.0 * self.bytes as f64 / median(copies),
            right: found == self.image(spec, dtype, values)?,
        })
    }

    fn copy_row(&self, spec: CodecSpec, dtype: DType, values: &[f32]) -> Result<CopyRow> {
        let mut host = vec![0u8; self.bytes];
        self.elements.read(0, &mut host, &self.stream, PATIENCE)?;
        let original = host.clone();
        let address = self.elements.address();
        let (mut there, mut back, mut plain_there, mut plain_back) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut right = true;
        for turn in 0..TURNS + 1 {
            // The last turn's result is compared, so results of earlier turns are overwritten.
            let is_last = turn == TURNS;
            if is_last {
                host.copy_from_slice(&original);
                self.elements.fill(POISON, &self.stream)?;
                self.stream.wait(PATIENCE)?;
            }
            let begin = Instant::now();
            // SAFETY: memory of this bench, every use of which is waited for.
            unsafe {
                let stream = &self.stream;
                self.copier
                    .to_device(spec, dtype, 0, &host, address, stream)?;
            }
            self.stream.wait(PATIENCE)?;
            let to_gpu = begin.elapsed();
            let mut brought = Vec::new();
            if is_last {
                brought = self.image(spec, dtype, values)?;
                self.elements.read(0, &mut host, &self.stream, PATIENCE)?;
                right &= host == brought;
                host.fill(POISON);
            }
            let begin = Instant::now();
            // SAFETY: as above.
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
            // SAFETY: pinned memory of so many bytes, which nothing else uses.
            let pinned =
                unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), self.bytes) };
            let begin = Instant::now();
            self.elements
                .write(self.bytes, pinned, &self.stream, PATIENCE)?;
            let plain_to_gpu = begin.elapsed();
            let begin = Instant::now();
            self.elements
                .read(self.bytes, pinned, &self.stream, PATIENCE)?;
            let plain_to_host = begin.elapsed();
            if turn == 0 {
                continue;
            }
            there.push(to_gpu.as_secs_f64());
            back.push(to_host.as_secs_f64());
            plain_there.push(plain_to_gpu.as_secs_f64());
            plain_back.push(plain_to_host.as_secs_f64());
        }
        let rate = |seconds| self.bytes as f64 / median(seconds);
        Ok(CopyRow {
            there: rate(there),
            back: rate(back),
            plain_there: rate(plain_there),
            plain_back: rate(plain_back),
            packing: self.packing(spec)?,
            right,
        })
    }
}

impl ArraysBench {
    /// Returns the bytes of fp32 that the threads of a copy encode a second when there is nothing else to do.
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

    /// Encodes and decodes elements on the host.
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

    /// Each line is complete in itself: what ran, how fast beside a plain copy, where, when and how.
    #[test]
    fn rows_for_machines_say_where_they_are_from() {
        let path = std::env::temp_dir().join(format!("cinch-arrays-{}", std::process::id()));
        let options: ArraysOptions = parsed(&format!("--json {}", path.display())).unwrap();
        let mut rows = Output::of_rows(options.json.clone()).unwrap();
        let array = DeviceRow {
            wire_percent: 26.5,
            encode: 2e12,
            decode: 3e12,
            copy: 4e12,
            right: true,
        };
        let copy = CopyRow {
            there: 30e9,
            back: 20e9,
            plain_there: 40e9,
            plain_back: 50e9,
            packing: 60e9,
            right: false,
        };
        for (work, right) in [(array.work(), array.right), (copy.work(8), copy.right)] {
            let record = ArraysRecord {
                codec: "linear8".into(),
                datatype: "f32".into(),
                bytes: 4096,
                right,
                work,
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
