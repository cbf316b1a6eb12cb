//! The version of what the members of a pod say to each other, and how neighbouring versions get on.
//!
//! Each member says in a line of its own in the pool which version it speaks. Two of them speak the lower of both minor
//! versions with each other. What reaches others than the peer (the controllers' log, what is kept on SSDs, messages of
//! the data path) is said in the version of the pod: the lowest minor of all members, which the controller that leads
//! works out and tells.
//!
//! | version | what it adds |
//! |---|---|
//! | 1.0 | the first |
//! | 1.1 | controllers tell daemons the version of the pod ([`ProtocolObject`](crate::objects::ProtocolObject)), and keep it in their log; an answer says whether a message was refused or not understood; a column of a striped volume moves ([`DiskObject::beside`](crate::objects::DiskObject::beside)); devices may be packed; volumes may be kept apart or together; hosts, devices and types of instances bear labels; devices are deleted without their hosts; moves in order keep a backup that carries what is reserved; of VMMs is remembered what a frontend's life before said; what an instance's kind promises of volumes ends with the lease; a fabric may have more elements than one board has lines for; SSDs are known by a number that stands on them; hosts look at how congested elements of the fabric are; guests are shown what discards their SSDs heed; network frontends know where backends receive ([`ChannelObject::receives`](crate::objects::ChannelObject::receives)); striped volumes are sure of something from the beginning; leases that a failover left without a backup get one after it |

use std::fmt;

use cxl_pool::{
    ControllerHello, EndpointId, Grant, Hello, Layout, Memory, Pool, Record, ReplicaHello, ReplicaId,
    SoftwareMemory,
};

/// A version: (major, minor). Of another major nothing is understood; each minor adds to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Protocol {
    /// Ends of different majors do not speak to each other.
    pub major: u16,
    /// Ends whose minors differ by one speak the lower one.
    pub minor: u16,
}

/// Two ends have no version in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatible {
    /// Nothing is understood.
    #[error(
        "it speaks version {theirs} of the protocol, and this side {ours}: major versions do not mix, so stop the pod and \
         start all of it with releases of one of them"
    )]
    Major {
        /// This end's version.
        ours: Protocol,
        /// The other end's.
        theirs: Protocol,
    },
    /// The other end is too old.
    #[error(
        "it speaks version {theirs} of the protocol, and this side {ours}, which works with {major}.{next} and later: upgrade \
         the other side to a release that speaks {major}.{next} first",
        major = ours.major, next = ours.minor.saturating_sub(1)
    )]
    TheirsIsOld {
        /// This end's version.
        ours: Protocol,
        /// The other end's.
        theirs: Protocol,
    },
    /// This end is too old.
    #[error(
        "it speaks version {theirs} of the protocol, which works with {major}.{next} and later, and this side {ours}: upgrade \
         this side to a release that speaks {major}.{next} first",
        major = theirs.major, next = theirs.minor.saturating_sub(1)
    )]
    OursIsOld {
        /// This end's version.
        ours: Protocol,
        /// The other end's.
        theirs: Protocol,
    },
}

impl Protocol {
    /// What this release speaks.
    pub const CURRENT: Self = Self { major: 1, minor: 1 };

    /// The first minor in which a controller tells the version of the pod.
    pub const TELLS_POD_VERSION: u16 = 1;
    /// The first minor in which an answer says whether a message was not understood.
    pub const TELLS_NOT_UNDERSTOOD: u16 = 1;
    /// The first minor in which columns of striped volumes move.
    pub const MOVES_COLUMNS: u16 = 1;
    /// The first minor in which volumes move between two SSDs of one host.
    pub const MOVES_WITHIN_HOSTS: u16 = 1;
    /// The first minor in which devices are packed where that is wanted. Controllers of the one before spread what they place, and
    /// all replicas have to place alike.
    pub const PACKS_DEVICES: u16 = 1;
    /// The first minor in which volumes are kept apart or together. Controllers of the one before place them as if nobody had said so.
    pub const GROUPS_VOLUMES: u16 = 1;
    /// The first minor in which hosts, devices and types of instances bear labels. Controllers of the one before cannot read what gives them to
    /// hosts and devices, and overlook those of types.
    pub const LABELS_DEVICES: u16 = 1;
    /// The first minor in which devices are deleted without their hosts. Controllers of the one before cannot read what says so.
    pub const DELETES_DEVICES: u16 = 1;
    /// The first minor in which a lease moves in order only to where a backup carries what it reserves. Controllers of the one before
    /// look at the NIC that it moves to.
    pub const PROVES_MOVES: u16 = 1;
    /// The first minor in which is remembered that a VMM used a device in the life before of its frontend. Controllers of the one before
    /// forget it, and frontends of that one do not say that nobody came.
    pub const REMEMBERS_VMMS: u16 = 1;
    /// The first minor in which what an instance's kind promises of a volume ends with the lease. Controllers of the one before make it the
    /// volume's own for good.
    pub const ENDS_PROMISES: u16 = 1;
    /// The first minor in which controllers look at more before they decide: whether a volume grows over what has yet to be wiped or
    /// adopted, or was adopted under another number, an instance gets two devices of one name, a volume is to lie on an SSD that does not work,
    /// moves in order keep NICs apart, one that leaves makes room for another, a
    /// backup carries frames of the guest's length, what a drain waits for goes on at all, a host that instances come to is to be empty, and a NIC
    /// that is to be empty or is not trusted
    /// is better than none. All replicas have to decide alike.
    pub const DECIDES_BY_MORE: u16 = 1;
    /// The first minor in which backups are chosen with the command after a failover. Controllers of the one before choose them with it, and
    /// all replicas have to decide alike.
    pub const DEFERS_BACKUPS: u16 = 1;
    /// The first minor in which frontends publish sums of what their own instances use of the fabric only, so that it may be as large as
    /// that allows. Controllers of the one before refuse a larger one.
    pub const SHARES_LARGE_FABRICS: u16 = 1;
    /// The first minor in which hosts look at how congested elements of the fabric are, where that is wanted. Controllers of the one before cannot
    /// read that it is.
    pub const LOOKS_AT_CONGESTION: u16 = 1;
    /// The first minor in which SSDs are known by a number that stands on them, so that one that was replaced is not taken for the one
    /// before. Controllers of the one before go by the name, and all replicas have to decide alike.
    pub const KNOWS_SSDS: u16 = 1;
    /// The first minor in which guests are shown what discards their SSDs heed. Controllers of the one before do not keep what SSDs say of it,
    /// and all replicas have to tell frontends the same.
    pub const SHOWS_DISCARDS: u16 = 1;
    /// The first minor in which volumes may be read only. Controllers of the one before would overlook that one is to be, and lease it as
    /// any other.
    pub const PROTECTS_VOLUMES: u16 = 1;
    /// The first minor in which network frontends are told where backends receive. Those of the one before look anywhere in the pool.
    pub const LIMITS_BACKENDS: u16 = 1;
    /// The first minor in which a striped volume is created with what it is sure of. Controllers of the one before would overlook that, and place it
    /// where there is no room for it.
    pub const RESERVES_STRIPED: u16 = 1;
    /// The first minor in which volumes that no instance uses are copied.
    pub const HAS_COPIERS: u16 = 1;

    /// The version of this release's major with another minor.
    #[must_use]
    pub const fn of_minor(minor: u16) -> Self {
        Self { major: Self::CURRENT.major, minor }
    }

    /// Reads what `--protocol-minor` says: the minor of this release, or the one before.
    pub fn parse_minor(text: &str) -> Result<Self, String> {
        let (oldest, newest) = (Self::CURRENT.minor.saturating_sub(1), Self::CURRENT.minor);
        match text.parse() {
            Ok(minor) if (oldest..=newest).contains(&minor) => Ok(Self::of_minor(minor)),
            _ => Err(format!("this release speaks minor {newest}, and {oldest} while a pod is upgraded")),
        }
    }

    /// What two ends speak with each other.
    pub fn with(self, theirs: Self) -> Result<Self, Incompatible> {
        let ours = self;
        if theirs.major != ours.major {
            Err(Incompatible::Major { ours, theirs })
        } else if theirs.minor.saturating_add(1) < ours.minor {
            Err(Incompatible::TheirsIsOld { ours, theirs })
        } else if ours.minor.saturating_add(1) < theirs.minor {
            Err(Incompatible::OursIsOld { ours, theirs })
        } else {
            Ok(ours.min(theirs))
        }
    }
}

impl Default for Protocol {
    fn default() -> Self {
        Self::CURRENT
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl From<(u16, u16)> for Protocol {
    fn from((major, minor): (u16, u16)) -> Self {
        Self { major, minor }
    }
}

impl From<Protocol> for (u16, u16) {
    fn from(protocol: Protocol) -> Self {
        (protocol.major, protocol.minor)
    }
}

/// What the controller speaks that gave this grant, as long as it is there.
pub(crate) fn of_grantor<M: Memory>(
    memory: &M,
    layout: &Layout,
    replica: ReplicaId,
    grant: &Grant,
) -> Option<Protocol> {
    let hello = ControllerHello::look(memory, layout.controller(replica))?;
    (hello.incarnation == grant.controller_incarnation).then(|| hello.protocol.into())
}

/// What the members of a pod say of themselves in the pool, for whoever shows it. Looking is cheap, and disturbs nobody.
#[derive(Clone)]
pub struct Spoken {
    /// None where no pool is reached.
    pool: Option<(SoftwareMemory, Layout)>,
}

impl Spoken {
    /// In this pool, of either mode: the careful way to read is right for both.
    pub fn new(pool: &Pool) -> Self {
        Self { pool: Some((pool.software(), pool.layout().clone())) }
    }

    /// Where no pool is reached, so that nobody says anything.
    pub const fn nowhere() -> Self {
        Self { pool: None }
    }

    /// What the daemon speaks that has, or had when it died, this slot.
    pub fn by_endpoint(&self, endpoint: EndpointId) -> Option<Protocol> {
        let (memory, layout) = self.pool.as_ref().filter(|(_, layout)| layout.has(endpoint))?;
        Hello::look(memory, layout.hello(endpoint)).map(|hello| hello.protocol.into())
    }

    /// What a controller replica speaks, or spoke when it was there last.
    pub fn by_replica(&self, replica: ReplicaId) -> Option<Protocol> {
        let (memory, layout) = self.pool.as_ref()?;
        let known = layout.replicas().any(|slot| slot == replica);
        let hello = known.then(|| ReplicaHello::look(memory, layout.replica_hello(replica)))?;
        hello.map(|hello| hello.protocol.into())
    }
}

impl fmt::Debug for Spoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spoken").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(major: u16, minor: u16) -> Protocol {
        Protocol { major, minor }
    }

    #[test]
    fn neighbours_speak_the_lower_minor() {
        let common = |a: Protocol, b: Protocol| a.with(b).map_err(|error| error.to_string());
        for (a, b, lower) in [(3, 3, 3), (3, 4, 3), (4, 3, 3), (0, 1, 0), (u16::MAX, u16::MAX, u16::MAX)] {
            assert_eq!(common(protocol(1, a), protocol(1, b)), Ok(protocol(1, lower)));
        }
    }

    #[test]
    fn others_are_told_which_side_to_upgrade_first() {
        let (ours, old, new) = (protocol(1, 3), protocol(1, 1), protocol(1, 5));
        let said = |theirs| ours.with(theirs).expect_err("too far apart").to_string();
        assert!(
            said(old).contains("upgrade the other side to a release that speaks 1.2 first"),
            "{}",
            said(old)
        );
        assert!(said(new).contains("upgrade this side to a release that speaks 1.4 first"), "{}", said(new));
        assert!(said(protocol(2, 3)).contains("stop the pod"), "{}", said(protocol(2, 3)));
        assert!(matches!(ours.with(protocol(1, u16::MAX)), Err(Incompatible::OursIsOld { .. })));
    }

    #[test]
    fn a_daemon_speaks_its_minor_or_the_one_before() {
        let newest = Protocol::CURRENT.minor;
        assert_eq!(Protocol::parse_minor(&newest.to_string()), Ok(Protocol::CURRENT));
        assert_eq!(Protocol::parse_minor(&(newest - 1).to_string()), Ok(Protocol::of_minor(newest - 1)));
        for wrong in [(newest + 1).to_string(), "1.0".into(), String::new(), "-1".into()] {
            let complaint = Protocol::parse_minor(&wrong).expect_err(&wrong);
            assert!(complaint.contains(&format!("minor {newest}")), "{complaint}");
        }
    }
}
