//! The codec of calls that name no codec, by process and communicator.
//!
//! Three places set the codec of a call: the process (`CINCH_CODEC`), the communicator (rules, or the
//! program) and the call. The narrowest place that is set wins; `off` is final for
//! narrower places. The choice depends on settings alone, not on data or on one rank: ranks with
//! equal settings make the same choice.

use super::Config;
use super::codec_rules::{CallConditions, CollectiveSet, CommFacts, DTypeSet, Rule, RuleDecision};
use crate::types::{CodecSetting, CodecSpec, DType};
use std::fmt;

/// Communicators to which the default codec of calls applies: the codec of calls that name none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecLinks {
    /// All communicators.
    All,
    /// Communicators that span hosts.
    Network,
}

impl CodecLinks {
    /// Returns the choice as a value of `CINCH_CODEC_LINKS`.
    pub const fn name(self) -> &'static str {
        match self {
            CodecLinks::All => "all",
            CodecLinks::Network => "network",
        }
    }
}

/// Parses the codec of a call: one codec, or `off` and `raw` for none.
///
/// # Errors
/// Invalid argument for unknown names and impossible parameters.
pub fn call_codec(text: &str) -> crate::Result<CodecSpec> {
    match text.trim() {
        "off" => Ok(CodecSpec::RAW),
        text => text.parse(),
    }
}

/// A codec of calls that name none, and the calls that it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyCodec {
    /// The codec.
    pub codec: CodecSetting,
    /// Least bytes of a rank's input.
    pub min_bytes: usize,
    /// Most bytes of a rank's input.
    pub max_bytes: usize,
    /// The collectives.
    pub collectives: CollectiveSet,
    /// The element types; `None` for all that codecs carry.
    dtypes: Option<DTypeSet>,
}

impl PolicyCodec {
    /// Returns whether the codec is for elements of this type.
    pub fn has_dtype(&self, one: DType) -> bool {
        self.dtypes.as_ref().is_none_or(|set| set.has(one))
    }

    /// Returns the codec of the process or program.
    fn of(config: &Config) -> PolicyCodec {
        PolicyCodec {
            codec: config.codec,
            min_bytes: config.codec_min_bytes,
            max_bytes: usize::MAX,
            collectives: config.codec_collectives,
            dtypes: None,
        }
    }

    /// Returns the codec of a rule; `self` is that of the process.
    fn by_rule(&self, codec: CodecSetting, calls: &CallConditions) -> PolicyCodec {
        let max_bytes = calls.max_bytes.unwrap_or(self.max_bytes);
        let usual = Some(self.min_bytes).filter(|&min| min <= max_bytes);
        PolicyCodec {
            codec,
            min_bytes: calls.min_bytes.or(usual).unwrap_or(0),
            max_bytes,
            collectives: calls.collectives.unwrap_or(self.collectives),
            dtypes: calls.dtypes.clone(),
        }
    }
}

impl fmt::Display for PolicyCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.codec, self.collectives)?;
        if let Some(set) = &self.dtypes {
            write!(f, " of {set}")?;
        }
        write!(f, " from {}", self.min_bytes)?;
        if self.max_bytes != usize::MAX {
            write!(f, " to {}", self.max_bytes)?;
        }
        f.write_str(" bytes")
    }
}

/// The policy of a communicator for calls that name no codec.
#[derive(Clone, Debug, PartialEq)]
pub struct CodecPolicy {
    /// Whether compression is off, also for calls that name a codec.
    pub off: bool,
    /// Codecs of calls that name none; the first that fits a call applies. Not empty.
    pub codecs: Vec<PolicyCodec>,
    /// Number of coded calls from one sample to the next; 0 samples none. A sampled call is also run
    /// exactly on a window.
    pub sample: u32,
    /// Relative error above which a sampled call switches the codec off.
    pub bound: f64,
    /// The setting that chose the codec, for the log.
    pub why: String,
}

impl CodecPolicy {
    /// Returns the policy of a communicator with these settings, name and properties. Its codecs may be by level until
    /// [`CodecPolicy::on_groups`] is called.
    pub fn new(config: &Config, facts: CommFacts) -> CodecPolicy {
        let policy = CodecPolicy {
            off: false,
            codecs: vec![PolicyCodec::of(config)],
            sample: config.codec_sample,
            bound: config.codec_bound,
            why: match config.codec_by_program {
                true => "by the program".into(),
                false if config.codec.is_lossy() => "by CINCH_CODEC".into(),
                false => "no CINCH_CODEC".into(),
            },
        };
        if config.codec_off {
            return policy.without(true, "CINCH_CODEC=off".into());
        }
        let rules = config.codec_rules.of(&config.comm_name, facts);
        let policy = match rules.is_empty() {
            true => policy,
            false => policy.under(&rules, config.codec_by_program),
        };
        policy.on(config.codec_links, facts.hosts == 1)
    }

    /// Returns whether a codec of the policy may change data.
    pub fn is_lossy(&self) -> bool {
        self.codecs.iter().any(|one| one.codec.is_lossy())
    }

    fn under(self, rules: &[&Rule], by_program: bool) -> CodecPolicy {
        let texts: Vec<String> = rules.iter().map(|rule| rule.to_string()).collect();
        let why = format!("by the rule {} of CINCH_CODEC_RULES", texts.join(","));
        let own = &self.codecs[0];
        let by_rule = rules.iter().filter_map(|rule| match &rule.decision {
            RuleDecision::Off => None,
            RuleDecision::Codec(codec, calls) => Some(own.by_rule(*codec, calls)),
        });
        let codecs: Vec<PolicyCodec> = by_rule.collect();
        match (codecs.is_empty(), by_program) {
            (true, _) => self.without(true, why),
            // The program chose the codec of this communicator itself; this choice overrides a rule
            // on names.
            (false, true) => self,
            (false, false) => CodecPolicy {
                codecs,
                why,
                ..self
            },
        }
    }

    fn on(self, links: CodecLinks, one_host: bool) -> CodecPolicy {
        if links == CodecLinks::Network && one_host && self.is_lossy() {
            let why = "all ranks are on one host, and CINCH_CODEC_LINKS=network".into();
            return self.without(false, why);
        }
        self
    }

    /// Returns whether a codec of the policy differs inside and between groups.
    pub fn is_by_level(&self) -> bool {
        self.codecs.iter().any(|one| one.codec.is_by_level())
    }

    /// Returns the policy of ranks in this many groups: hosts, or the groups of a topology inside one host. In one group
    /// no message goes between groups, so all messages have the codec inside groups.
    pub fn on_groups(mut self, groups: usize) -> CodecPolicy {
        for one in &mut self.codecs {
            one.codec = one.codec.on(groups);
        }
        self
    }

    fn without(mut self, off: bool, why: String) -> CodecPolicy {
        self.codecs.truncate(1);
        self.codecs[0].codec = CodecSetting::RAW;
        CodecPolicy { off, why, ..self }
    }

    /// Returns the effective value of a setting that influences this policy, or `None` for any other setting.
    /// The values must be equal on all ranks, but the rules that produce them may differ.
    pub fn in_effect(&self, name: &str) -> Option<String> {
        let all = |show: &dyn Fn(&PolicyCodec) -> String| {
            let texts: Vec<String> = self.codecs.iter().map(show).collect();
            texts.join(";")
        };
        Some(match name {
            "CINCH_CODEC" if self.off => "off".into(),
            "CINCH_CODEC" => all(&|one| {
                let dtypes = one.dtypes.iter().map(|set| format!(":dtype={set}"));
                let most = (one.max_bytes != usize::MAX).then(|| format!(":max={}", one.max_bytes));
                let conditions = dtypes.chain(most);
                std::iter::once(one.codec.to_string())
                    .chain(conditions)
                    .collect()
            }),
            "CINCH_CODEC_MIN_BYTES" => all(&|one| one.min_bytes.to_string()),
            "CINCH_CODEC_COLLECTIVES" => all(&|one| one.collectives.to_string()),
            "CINCH_CODEC_SAMPLE" => self.sample.to_string(),
            "CINCH_CODEC_BOUND" => self.bound.to_string(),
            _ => return None,
        })
    }
}

impl fmt::Display for CodecPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_lossy() {
            return write!(f, "compression off: {}", self.why);
        }
        for (at, one) in self.codecs.iter().enumerate() {
            let between = if at == 0 { "" } else { "; " };
            write!(f, "{between}{one}")?;
        }
        write!(f, ", {}", self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CodecRules, Origin};
    use super::*;

    fn on_hosts(hosts: usize) -> CommFacts {
        CommFacts::first(4, hosts)
    }

    fn config(settings: &[(&str, &str)]) -> Config {
        let mut config = Config::default();
        for (name, value) in settings {
            config.set(name, value, Origin::Environment).unwrap();
        }
        config
    }

    /// Each row lists the codecs of process, rules and program, and the communicator's name. The last two
    /// columns are the expected codec, and whether compression is finally off.
    #[test]
    fn narrowest_codec_wins_and_off_is_final() {
        let rules = "dp*=linear8,tp*=off,ep?=raw,*=static8";
        for (process, rules, program, name, codec, off) in [
            (None, None, None, "dp", "raw", false),
            (
                Some("dynamic8"),
                None,
                None,
                "dp",
                "dynamic8:block=256",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                None,
                "dp0",
                "linear8:block=256",
                false,
            ),
            (Some("dynamic8"), Some(rules), None, "tp0", "raw", true),
            (Some("dynamic8"), Some(rules), None, "ep1", "raw", false),
            (Some("dynamic8"), Some(rules), None, "", "static8", false),
            (None, Some(rules), None, "dp", "linear8:block=256", false),
            (
                None,
                Some("dp=auto:linear8"),
                None,
                "dp",
                "auto:linear8:block=256",
                false,
            ),
            (Some("off"), Some(rules), None, "dp", "raw", true),
            (
                Some("raw"),
                Some(rules),
                None,
                "dp",
                "linear8:block=256",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("cast16"),
                "dp",
                "cast16",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("cast16"),
                "tp",
                "raw",
                true,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("off"),
                "dp",
                "raw",
                true,
            ),
            (Some("off"), None, Some("cast16"), "dp", "raw", true),
            (Some("dynamic8"), None, Some("raw"), "dp", "raw", false),
        ] {
            let case = format!("{process:?} {rules:?} {program:?} {name}");
            let mut config = config(&[]);
            let mut set = |knob, value: Option<&str>, origin| {
                value.map(|value| config.set(knob, value, origin).unwrap())
            };
            set("CINCH_CODEC", process, Origin::Environment);
            set("CINCH_CODEC_RULES", rules, Origin::Environment);
            set("CINCH_CODEC", program, Origin::Program);
            config.comm_name = name.into();
            let policy = CodecPolicy::new(&config, on_hosts(1));
            assert_eq!(
                policy.codecs[0].codec.to_string(),
                codec,
                "{case}: {policy}"
            );
            assert_eq!(policy.off, off, "{case}: {policy}");
        }
    }

    #[test]
    fn rule_has_its_own_size_and_collectives() {
        let mut config = config(&[
            ("CINCH_CODEC_MIN_BYTES", "1M"),
            (
                "CINCH_CODEC_RULES",
                "emb=dynamic8:block=64:min=64K:for=all_gather+reduce_scatter",
            ),
        ]);
        config.comm_name = "emb".into();
        let policy = CodecPolicy::new(&config, on_hosts(1));
        assert_eq!(policy.codecs[0].codec.to_string(), "dynamic8:block=64");
        assert_eq!(policy.codecs[0].min_bytes, 64 << 10);
        assert_eq!(
            policy.codecs[0].collectives.to_string(),
            "all_gather,reduce_scatter"
        );
        // Printed rules parse to the same rules.
        let text = config.codec_rules.to_string();
        assert_eq!(CodecRules::parse(&text), Ok(config.codec_rules.clone()));
        config.comm_name = "other".into();
        let policy = CodecPolicy::new(&config, on_hosts(1));
        assert_eq!(policy.codecs[0].min_bytes, 1 << 20);
        assert_eq!(policy.to_string(), "compression off: no CINCH_CODEC");
    }

    /// Each row lists ranks, hosts and order of a communicator, and the codecs that calls get, in order.
    #[test]
    fn rules_choose_by_properties_of_the_communicator() {
        let rules = "dp*=off:ranks=2,dp*=dynamic8:ranks=3-8:hosts=2-,dp*=linear8:min=1M:hosts=2-,\
                     *=trunc16:order=1";
        let mut config = config(&[("CINCH_CODEC", "cast16"), ("CINCH_CODEC_RULES", rules)]);
        for (name, (ranks, hosts, order), expected) in [
            ("dp", (2, 2, 1), "off"),
            ("dp", (8, 2, 1), "dynamic8:block=256"),
            ("dp", (9, 2, 1), "linear8:block=256"),
            ("dp", (8, 1, 1), "trunc16"),
            ("dp", (8, 1, 2), "cast16"),
            ("tp", (2, 2, 1), "trunc16"),
        ] {
            config.comm_name = name.into();
            let facts = CommFacts {
                ranks,
                hosts,
                order,
            };
            let policy = CodecPolicy::new(&config, facts);
            let codec = policy.in_effect("CINCH_CODEC").unwrap();
            assert_eq!(codec, expected, "{name} {facts:?}");
        }
        let text = config.codec_rules.to_string();
        assert_eq!(CodecRules::parse(&text), Ok(config.codec_rules.clone()));
    }

    #[test]
    fn rules_of_one_pattern_are_alternatives_by_call() {
        let rules = "*=minmax4:min=64M,*=dynamic8:min=1M:max=63M:dtype=bf16+f16";
        let config = config(&[
            ("CINCH_CODEC_RULES", rules),
            ("CINCH_CODEC_MIN_BYTES", "2M"),
        ]);
        let policy = CodecPolicy::new(&config, on_hosts(1));
        let codecs = policy.in_effect("CINCH_CODEC").unwrap();
        let second = "dynamic8:block=256:dtype=f16+bf16:max=66060288";
        assert_eq!(codecs, format!("minmax4:block=256;{second}"));
        let least = policy.in_effect("CINCH_CODEC_MIN_BYTES").unwrap();
        assert_eq!(least, "67108864;1048576");
        let [large, half] = &policy.codecs[..] else {
            panic!("{policy}");
        };
        assert!(large.has_dtype(DType::F32) && !half.has_dtype(DType::F32));
        assert!(half.has_dtype(DType::BF16));
        // The minimum of the process is more than this rule codes.
        let mut small = config.clone();
        small.codec_rules = CodecRules::parse("*=linear8:max=64K").unwrap();
        let policy = CodecPolicy::new(&small, on_hosts(1));
        assert_eq!(policy.codecs[0].min_bytes, 0);
    }

    #[test]
    fn one_host_with_codec_for_network_is_exact() {
        let mut config = config(&[("CINCH_CODEC", "linear8")]);
        assert!(CodecPolicy::new(&config, on_hosts(1)).is_lossy());
        config
            .set("CINCH_CODEC_LINKS", "network", Origin::Environment)
            .unwrap();
        let near = CodecPolicy::new(&config, on_hosts(1));
        // The setting turns off only the default codec; `off` stays false, so a call may still name
        // a codec.
        assert!(!near.is_lossy() && !near.off);
        assert!(near.to_string().contains("one host"), "{near}");
        assert!(CodecPolicy::new(&config, on_hosts(2)).is_lossy());
    }

    #[test]
    fn codec_of_call_is_parsed() {
        assert_eq!(call_codec(" off ").unwrap(), CodecSpec::RAW);
        assert_eq!(call_codec("raw").unwrap(), CodecSpec::RAW);
        assert_eq!(
            call_codec("linear8:block=64").unwrap().to_string(),
            "linear8:block=64"
        );
        assert!(call_codec("int8").is_err());
        assert!(call_codec("").is_err());
    }
}
