//! Command-line options of the program.

use std::time::Duration;

pub const USAGE: &str = "\
gpu [--filter PART] [--list] [--quick | --full] [--minutes M] [--seed S] [--host]
  --filter PART  only checks whose names contain PART
  --list         names of the checks
  --quick        every pair of choices at least once; the default
  --full         more of everything
  --minutes M    random operations for so long (0: a few seconds)
  --seed S       of all randomness
  --host         the checks that can, on host memory: for trying the tests themselves";

/// Role of a process in a run.
#[derive(Clone, Debug)]
pub enum Role {
    /// Starts worker processes and prints the results of checks.
    Supervisor,
    /// Runs the checks from number `from` on.
    Worker { from: usize },
    /// Runs one rank of a test with a process per rank.
    Rank { task: String },
}

#[derive(Clone, Debug)]
pub struct Options {
    pub role: Role,
    pub filter: Option<String>,
    pub list: bool,
    pub full: bool,
    pub minutes: f64,
    pub seed: u64,
    /// Runs the checks on host memory.
    pub host: bool,
}

impl Options {
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            role: Role::Supervisor,
            filter: None,
            list: false,
            full: false,
            minutes: 0.0,
            seed: 20_261_120,
            host: false,
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let (name, glued) = match word.split_once('=') {
                Some((name, value)) => (name.to_string(), Some(value.to_string())),
                None => (word.clone(), None),
            };
            let mut value = || {
                let value = glued.clone().or_else(|| words.next());
                value.ok_or_else(|| format!("{word} takes a value"))
            };
            match name.as_str() {
                "--filter" => options.filter = Some(value()?),
                "--list" => options.list = true,
                "--quick" => options.full = false,
                "--full" => options.full = true,
                "--host" => options.host = true,
                "--minutes" => {
                    options.minutes = number(&name, &value()?)?;
                    if !(0.0..=600.0).contains(&options.minutes) {
                        return Err("--minutes takes 0 to 600".into());
                    }
                }
                "--seed" => options.seed = number(&name, &value()?)?,
                "--worker" => {
                    options.role = Role::Worker {
                        from: number(&name, &value()?)?,
                    }
                }
                "--rank" => options.role = Role::Rank { task: value()? },
                // Cargo passes these options of its own test harness; they have no effect here.
                "--nocapture" | "--show-output" | "--exact" | "--quiet" | "-q" => {}
                "--test-threads" | "--format" | "--color" => drop(value()?),
                _ if !word.starts_with('-') => options.filter = Some(word),
                _ => return Err(format!("there is no option {word}")),
            }
        }
        Ok(options)
    }

    /// Returns the arguments that start another process with these options.
    pub fn words(&self) -> Vec<String> {
        let mut words = vec![
            format!("--seed={}", self.seed),
            format!("--minutes={}", self.minutes),
        ];
        words.extend(self.filter.iter().map(|part| format!("--filter={part}")));
        words.extend(self.full.then(|| "--full".into()));
        words.extend(self.host.then(|| "--host".into()));
        words
    }

    /// Returns how long the random operations run.
    pub fn soak(&self) -> Duration {
        let least = if self.full { 20.0 } else { 5.0 };
        Duration::from_secs_f64((self.minutes * 60.0).max(least))
    }

    /// Returns `quick` in quick runs and `full` in full ones.
    pub fn either<T>(&self, quick: T, full: T) -> T {
        if self.full { full } else { quick }
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{name}={text} is not a number"))
}
