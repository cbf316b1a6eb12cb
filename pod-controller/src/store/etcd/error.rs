/// Why an etcd does not keep the state.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    /// The connection cannot be prepared.
    #[error("cannot prepare the connection to {place}: {reason}")]
    SetUp {
        /// Where the state is.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// It does not answer, or cannot do what it is asked for.
    #[error("{place} cannot be used ({reason}): {advice}; until then nothing is changed, and engines go on")]
    Away {
        /// Where the state is.
        place: String,
        /// What happened.
        reason: String,
        /// What to do.
        advice: &'static str,
        /// Whether what was asked for may have been done all the same.
        open: bool,
    },
    /// Another controller is there.
    #[error(
        "another controller ({holder}) keeps its state in {place}: stop that one first, or use another prefix for another \
         pod; if it died just now, start this one again in some seconds"
    )]
    InUse {
        /// Where the state is.
        place: String,
        /// Who.
        holder: String,
    },
    /// Another controller counts as there still, and is not waited for any more.
    #[error("{holder} counts as there in {place}, and is not waited for")]
    GivenUp {
        /// Where the state is.
        place: String,
        /// Who.
        holder: String,
    },
    /// Another controller has come while this one could not be heard of.
    #[error("{by} has taken over {place} from this controller: only one controller can keep its state there")]
    TakenOver {
        /// Where the state is.
        place: String,
        /// Who.
        by: String,
    },
    /// There is nothing.
    #[error(
        "there is no state in {place}: to begin a pod there, start once with --bootstrap, which goes on with the state file \
         if there is one; if there should be a state, look at the prefix, and at what became of etcd"
    )]
    Empty {
        /// Where the state is.
        place: String,
    },
    /// It is not what a controller wrote.
    #[error(
        "what is in {place} is damaged or no state ({reason}): restore etcd from a backup, or use another prefix to begin a \
         new pod"
    )]
    Damaged {
        /// Where the state is.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// It was written by another version.
    #[error(
        "what is in {place} has format {found}, and this controller reads 1: use the version that wrote it"
    )]
    Format {
        /// Where the state is.
        place: String,
        /// Its format.
        found: u64,
    },
}
