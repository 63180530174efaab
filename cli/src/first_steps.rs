//! `cinch` without arguments: what this machine has, and which command comes next.

use crate::preload;
use cinch::gpu::{Driver, kernels};
use std::io::{self, Write};

/// Facts from which the first steps follow.
struct Facts {
    cores: usize,
    /// Number of GPUs, or why none can be used.
    gpus: Result<usize, String>,
    /// Whether the drop-in libnccl lies beside this tool.
    has_drop_in: bool,
}

impl Facts {
    fn detect() -> Facts {
        let gpus = match kernels::STATE {
            kernels::State::Missing { why } => Err(format!("this build has no kernels: {why}")),
            _ => Driver::load()
                .and_then(|driver| driver.device_count())
                .map(|count| count as usize)
                .map_err(|error| error.message().to_string()),
        };
        Facts {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            gpus,
            has_drop_in: preload::find(None).is_ok(),
        }
    }
}

/// Prints the first steps on this machine.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(out: &mut dyn Write) -> io::Result<()> {
    write_for(&Facts::detect(), out)
}

fn write_for(facts: &Facts, out: &mut dyn Write) -> io::Result<()> {
    let gpus = match &facts.gpus {
        Ok(0) => "no GPU".to_string(),
        Ok(1) => "1 GPU".to_string(),
        Ok(count) => format!("{count} GPUs"),
        Err(why) => format!("no GPU ({why})"),
    };
    let has_gpus = matches!(facts.gpus, Ok(1..));
    writeln!(
        out,
        "cinch {}: collective communication with compression inside every pipeline chunk\n\
         This machine: {} cores, {gpus}. What next?\n",
        cinch::VERSION,
        facts.cores
    )?;
    let ranks = facts.cores.clamp(2, 8);
    let bench = match has_gpus {
        true => {
            "cinch bench all_reduce --device gpu -b 1K -e 64M -f 8 --codec raw,linear8".to_string()
        }
        false => {
            format!("cinch bench all_reduce --ranks {ranks} -b 1K -e 64M -f 8 --codec raw,linear8")
        }
    };
    let program = match facts.has_drop_in {
        true => "cinch run --preload -- torchrun --nproc-per-node 2 train.py",
        false => "cinch run --preload=PATH/libnccl.so.2 -- torchrun --nproc-per-node 2 train.py",
    };
    for (what, command) in [
        ("check this machine, and get advice", "cinch doctor"),
        ("measure, raw and in 8 bits", &bench),
        (
            "start your own program as ranks",
            &format!("cinch run -n {ranks} -- ./program"),
        ),
        ("run a program that was built for NCCL", program),
        (
            "see what running ranks do",
            "CINCH_PS=1 ./program, then: cinch top, cinch ps",
        ),
        (
            "learn where compression would help",
            "cinch advise METRICS_FILE",
        ),
        (
            "all commands, and the options of each",
            "cinch --help, cinch COMMAND --help",
        ),
    ] {
        writeln!(out, "  {what:<39} {command}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn shown(facts: &Facts) -> String {
        let mut out = Vec::new();
        write_for(facts, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn first_steps_fit_the_machine() {
        let host = shown(&Facts {
            cores: 64,
            gpus: Err("libcuda.so.1 is missing".into()),
            has_drop_in: false,
        });
        assert!(
            host.contains("64 cores, no GPU (libcuda.so.1 is missing)"),
            "{host}"
        );
        assert!(
            host.contains("--ranks 8") && !host.contains("--device gpu"),
            "{host}"
        );
        assert!(host.contains("--preload=PATH"), "{host}");
        let gpus = shown(&Facts {
            cores: 1,
            gpus: Ok(4),
            has_drop_in: true,
        });
        assert!(
            gpus.contains("1 cores, 4 GPUs") && gpus.contains("--device gpu"),
            "{gpus}"
        );
        assert!(gpus.contains("cinch run --preload -- "), "{gpus}");
    }

    /// Each command that is shown must be one that the tool takes.
    #[test]
    fn every_step_is_a_valid_command() {
        let facts = Facts {
            cores: 4,
            gpus: Ok(1),
            has_drop_in: true,
        };
        let text = shown(&facts);
        let commands: Vec<&str> = text
            .lines()
            .filter_map(|line| {
                line.split_once("  cinch ")
                    .or_else(|| line.split_once(" cinch "))
            })
            .map(|(_, command)| command)
            .filter(|command| !command.contains(','))
            .collect();
        assert!(commands.len() >= 3, "{text}");
        for command in commands {
            let words = ["cinch"].into_iter().chain(command.split(' '));
            if let Err(error) = crate::Cli::try_parse_from(words) {
                panic!("{command}: {error}");
            }
        }
    }
}
