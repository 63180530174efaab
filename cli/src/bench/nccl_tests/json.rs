//! The JSON file of nccl-tests (`-J`), in version 3 of its form.

use super::super::options::BenchOptions;
use super::super::record::{Figures, Record};
use super::table::{program, reduction_name, totals, type_name};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::io::{self, Write};

/// Version of the form.
const VERSION: u32 = 3;

/// Prefixes of environment variables that are written. Others may hold secrets.
const SHOWN: [&str; 3] = ["CINCH_", "NCCL_", "CUDA_"];

/// Begins the names of variables that launchers hand to ranks. One of them holds the secret of the unique id.
const LAUNCH: &str = "CINCH_LAUNCH_";

/// Writes all records. `places` are host and process of each rank.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_json(
    options: &BenchOptions,
    places: &[(String, u32)],
    records: &[Record],
    out: &mut dyn Write,
) -> io::Result<()> {
    let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S").to_string();
    let env = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let is_shown = SHOWN.iter().any(|prefix| name.starts_with(prefix));
        (is_shown && !name.starts_with(LAUNCH))
            .then(|| format!("{name}={}", value.to_string_lossy()))
    });
    let (wrong, mean) = totals(records);
    let okay = if wrong == 0 { "true" } else { "false" };
    let file = json!({
        "version": VERSION,
        "start_time": records.first().map_or("", |record| &record.run.date),
        "args": std::env::args_os().map(|it| it.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "env": env.collect::<Vec<_>>(),
        "cinch_version": cinch::VERSION,
        "config": config(options, places, records),
        "results": records.iter().map(|record| result(options, record)).collect::<Vec<_>>(),
        "out_of_bounds": { "count": wrong, "okay": okay },
        "average_bus_bandwidth": { "bandwidth": mean, "okay": "unchecked" },
        "errors": [],
        "end_time": now,
    });
    serde_json::to_writer(&mut *out, &file)?;
    writeln!(out)
}

fn config(options: &BenchOptions, places: &[(String, u32)], records: &[Record]) -> Value {
    let sizes: Vec<usize> = records.iter().map(|record| record.size).collect();
    let gpu = records.first().map_or("", |record| record.run.gpu.as_str());
    let devices = places.iter().enumerate().map(|(rank, (host, pid))| {
        let device = options.gpu.gpu_of(rank, places.len());
        json!({
            "rank": rank, "group": 0, "pid": pid, "hostname": host, "device": device, "device_hex": "",
            "device_info": if gpu.is_empty() { "host memory" } else { gpu },
        })
    });
    let mut config = json!({
        "nthreads": 1,
        "ngpus": options.gpu.gpus.unwrap_or(1),
        "minimum_bytes": sizes.iter().min(),
        "maximum_bytes": sizes.iter().max(),
        "warmup_iters": options.warmup,
        "iterations": options.iters,
        "aggregated_iterations": 1,
        "validation": options.check,
        "graph": u8::from(options.gpu.graph),
        "blocking_collectives": "false",
        "per_iter_timing": if options.nccl_tests.per_iter_timing > 0 { "true" } else { "false" },
        "per_iter_skip": options.nccl_tests.per_iter_skip,
        "parallel_init": "true",
        "devices": devices.collect::<Vec<_>>(),
    });
    match options.stepfactor {
        Some(factor) => config["step_factor"] = factor.into(),
        None => config["step_bytes"] = options.stepbytes.into(),
    }
    config
}

fn result(options: &BenchOptions, record: &Record) -> Value {
    let mut result = json!({
        "size": record.size,
        "count": record.count,
        "type": type_name(&record.dtype),
        "redop": reduction_name(&record.redop),
        "root": record.root.to_string(),
        "out_of_place": figures(&record.out_of_place),
        "in_place": record.in_place.as_ref().map(figures),
        "actual_iterations": record.out_of_place.iterations,
        "experiment_name": options.collective.name(),
        "program": program(options.collective),
        // Beyond the form: what compression did.
        "codec": record.codec,
        "wire_bytes": record.wire_bytes,
    });
    if options.nccl_tests.per_iter_timing > 0 {
        for (placement, figures) in record.placements() {
            let each = per_iteration(&figures.rank_times_us, options.nccl_tests.per_iter_skip);
            result[format!("{placement}_per_iter")] = each;
        }
    }
    result
}

fn figures(figures: &Figures) -> Value {
    json!({
        "time": figures.time_us,
        "alg_bw": figures.alg_bw,
        // The bus bandwidth of nccl-tests counts uncompressed bytes.
        "bus_bw": figures.eff_bus_bw,
        "nwrong": figures.nwrong,
        "rms_rel_err": figures.rms_rel_err,
    })
}

/// Returns the times of the iterations of each rank, and statistics of the slowest rank's without the first
/// `skip`. At least one iteration counts.
fn per_iteration(ranks: &[Vec<f64>], skip: usize) -> Value {
    let iterations = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let slowest = |at: usize| ranks.iter().map(|times| times[at]).fold(0.0, f64::max);
    let times: Vec<f64> = (0..iterations).map(slowest).collect();
    let skip = skip.min(iterations.saturating_sub(1));
    let mut sorted = times[skip..].to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        return Value::Object(Map::new());
    }
    // The smallest time that a share of the times does not exceed.
    let nearest = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
    let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
    let squares: f64 = sorted.iter().map(|time| (time - mean).powi(2)).sum();
    let deviation = (squares / sorted.len() as f64).sqrt();
    json!({
        "skipped_iterations": skip,
        "min_us": sorted[0],
        "max_us": sorted[sorted.len() - 1],
        "avg_us": mean,
        "p50_us": sorted[sorted.len() / 2],
        "p95_us": nearest(95),
        "p99_us": nearest(99),
        "stdev_us": deviation,
        "cv_pct": if mean > 0.0 { 100.0 * deviation / mean } else { 0.0 },
        "times_us": times,
        "per_process_max_times_us": ranks,
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::record::tests::record;
    use super::*;
    use crate::testing::parsed;

    #[test]
    fn analysers_find_times_of_each_iteration_and_rank() {
        let options: BenchOptions = parsed("all_reduce -J x.json -I 1 -K 1 -f 2").unwrap();
        let mut row = record(1024, "raw");
        row.out_of_place.rank_times_us = vec![vec![9.0, 2.0, 3.0], vec![1.0, 4.0, 2.0]];
        let places = [("a".to_string(), 11), ("b".to_string(), 12)];
        let mut out = Vec::new();
        write_json(&options, &places, &[row], &mut out).unwrap();
        let file: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            (&file["version"], &file["config"]["iterations"]),
            (&json!(3), &json!(20))
        );
        assert_eq!(file["config"]["devices"][1]["hostname"], "b");
        let result = &file["results"][0];
        assert_eq!(
            (&result["type"], &result["root"]),
            (&json!("float"), &json!("-1"))
        );
        assert_eq!(result["out_of_place"]["bus_bw"], 2.25);
        let each = &result["out_of_place_per_iter"];
        // NVIDIA's analyze_perf_json calls a row consistent if its times are the largest over the processes.
        assert_eq!(each["times_us"], json!([9.0, 4.0, 3.0]));
        assert_eq!(
            each["per_process_max_times_us"],
            json!([[9.0, 2.0, 3.0], [1.0, 4.0, 2.0]])
        );
        assert_eq!(
            (&each["skipped_iterations"], &each["max_us"]),
            (&json!(1), &json!(4.0))
        );
        assert_eq!(
            (&each["avg_us"], &each["stdev_us"]),
            (&json!(3.5), &json!(0.5))
        );
        assert_eq!(file["out_of_bounds"], json!({ "count": 0, "okay": "true" }));
    }

    #[test]
    fn variables_that_may_hold_secrets_are_left_out() {
        let options: BenchOptions = parsed("all_reduce").unwrap();
        let mut out = Vec::new();
        write_json(&options, &[], &[record(8, "raw")], &mut out).unwrap();
        let file: Value = serde_json::from_slice(&out).unwrap();
        let env = file["env"].as_array().unwrap();
        let is_shown = |it: &Value| {
            SHOWN
                .iter()
                .any(|prefix| it.as_str().unwrap().starts_with(prefix))
        };
        assert!(env.iter().all(is_shown), "{env:?}");
    }
}
