//! The text protocol of NCCL's RAS subsystem, by which programs ask for the state of a job: `CINCH_NCCL_RAS`.
//!
//! Commands are lines, in any case of letters: `CLIENT PROTOCOL n`, `TIMEOUT seconds`, `SET FORMAT text` or `json`,
//! `STATUS` and `VERBOSE STATUS`. A status ends the connection. `docs/nccl.md` lists what the answers leave out.
//! `recorder` in `cinch` listens and gathers.

mod json;
mod status;
mod text;

use cinch::Config;
use cinch::config::loopback_addresses;
use cinch::gpu::Driver;
use cinch::recorder::{self, JobSnapshot, TextReply, TextServiceSettings, TextSession};
use std::sync::Arc;
use std::time::Duration;

/// Version of the protocol that NCCL 2.30 has.
const PROTOCOL: u32 = 2;
/// Longest time to wait for other processes, unless a client sets another.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that a client can set. Other clients of this process wait meanwhile.
const MAX_TIMEOUT: Duration = Duration::from_secs(60);

/// Makes the communicators of this process answer, if the settings permit it.
pub(crate) fn offer(config: &Config) {
    if !config.nccl_ras {
        return;
    }
    let versions = Versions {
        nccl: config.nccl_version,
        driver: None,
    };
    recorder::offer_text_service(TextServiceSettings {
        name: config.nccl_ras_addr.clone(),
        // The text was checked when it was set.
        addresses: loopback_addresses(&config.nccl_ras_addr).unwrap_or_default(),
        session: Arc::new(move || Box::new(RasSession::new(versions))),
    });
}

/// Versions that answers name.
#[derive(Clone, Copy, Debug)]
struct Versions {
    /// Version of NCCL, as NCCL writes versions.
    nccl: u32,
    /// Version of CUDA that the driver supports, as CUDA writes versions; `None` without a driver.
    driver: Option<u32>,
}

impl Versions {
    /// Returns the version of NCCL for people, as 2.28.9.
    fn nccl_text(self) -> String {
        format!(
            "{}.{}.{}",
            self.nccl / 10000,
            self.nccl / 100 % 100,
            self.nccl % 100
        )
    }
}

/// The commands that a client has sent.
struct RasSession {
    versions: Versions,
    timeout: Duration,
    is_json: bool,
}

impl RasSession {
    fn new(versions: Versions) -> RasSession {
        RasSession {
            versions,
            timeout: DEFAULT_TIMEOUT,
            is_json: false,
        }
    }

    fn status(&self, is_verbose: bool, gather: &dyn Fn(Duration) -> JobSnapshot) -> TextReply {
        let job = gather(self.timeout);
        let versions = Versions {
            // A process of host memory alone does not load the driver for an answer.
            driver: Driver::in_use().map(|driver| driver.version()),
            ..self.versions
        };
        TextReply {
            text: match self.is_json {
                true => json::status(&job, versions),
                false => text::status(&job, versions, is_verbose),
            },
            is_last: true,
        }
    }

    fn set_timeout(&mut self, seconds: &str) -> String {
        match seconds.parse::<u64>() {
            // In NCCL, 0 is no limit.
            Ok(0) => self.timeout = MAX_TIMEOUT,
            Ok(seconds) => self.timeout = Duration::from_secs(seconds).min(MAX_TIMEOUT),
            Err(_) => return error(&format!("TIMEOUT takes whole seconds, not {seconds}")),
        }
        OK.into()
    }

    fn set_format(&mut self, format: &str) -> String {
        self.is_json = match format {
            "text" => false,
            "json" => true,
            _ => return error(&format!("SET FORMAT takes text or json, not {format}")),
        };
        OK.into()
    }
}

const OK: &str = "OK\n";

fn error(why: &str) -> String {
    format!("ERROR: {why}\n")
}

impl TextSession for RasSession {
    fn answer(&mut self, line: &str, gather: &dyn Fn(Duration) -> JobSnapshot) -> TextReply {
        let command = line.trim_end().to_ascii_lowercase();
        let text = match command.as_str() {
            "status" => return self.status(false, gather),
            "verbose status" => return self.status(true, gather),
            _ => match (
                command.strip_prefix("timeout "),
                command.strip_prefix("set format "),
            ) {
                (Some(seconds), _) => self.set_timeout(seconds.trim()),
                (_, Some(format)) => self.set_format(format.trim()),
                // A client of another version reads the answer, and decides.
                _ if command.starts_with("client protocol ") => {
                    format!("SERVER PROTOCOL {PROTOCOL}\n")
                }
                _ if command == "monitor" || command.starts_with("monitor ") => {
                    error("MONITOR is not offered; ask for STATUS in turn")
                }
                _ => error(&format!("unknown command {}", line.trim_end())),
            },
        };
        TextReply {
            text,
            is_last: false,
        }
    }
}

#[cfg(test)]
mod tests;
