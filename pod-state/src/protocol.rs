//! What the whole pod speaks.

use pod_protocol::objects::{Object, ObjectId, ProtocolObject};
use pod_protocol::protocol::Protocol;

use super::{Command, Effect, Filling, Labelled, Objects, Options, Refusal, RefusalKind, State};

impl State {
    /// The version in which is said what others than a direct peer hear or read: every member of the pod knows it.
    pub fn protocol(&self) -> Protocol {
        Protocol::of_minor(self.options.protocol_minor)
    }

    /// What makes the pod speak this minor. A replica of the version before reads it, and sees nothing new in it.
    pub fn speaking(&self, minor: u16) -> Command {
        Command::Configure { options: Options { protocol_minor: minor, ..self.options.clone() } }
    }

    /// Whether columns of striped volumes may move: controllers of 1.0 refuse what has them move, and frontends of 1.0 do not copy.
    pub(super) fn moves_columns(&self) -> bool {
        self.options.protocol_minor >= Protocol::MOVES_COLUMNS
    }

    /// Refuses what some of the pod does not know yet: controllers of 1.0 would carry it out as if some of it had not been said, or not
    /// at all. It is asked before a command goes to whoever leads, and by whoever carries it out.
    pub fn check_spoken(&self, command: &Command) -> Result<(), Refusal> {
        let minor = self.options.protocol_minor;
        match command {
            Command::Request { asked, .. } => self.check_spoken(asked),
            Command::CreateVolume { groups, .. }
            | Command::CreateStriped { groups, .. }
            | Command::ChangeVolume { groups: Some(groups), .. }
                if !groups.is_empty() && minor < Protocol::GROUPS_VOLUMES =>
            {
                Err(not_yet("volumes are kept apart or together", Protocol::GROUPS_VOLUMES))
            }
            Command::CreateStriped { minimum_iops, minimum_bytes_per_second, .. }
                if (minimum_iops.is_some() || minimum_bytes_per_second.is_some())
                    && minor < Protocol::RESERVES_STRIPED =>
            {
                Err(not_yet(
                    "striped volumes reserve something when they are made",
                    Protocol::RESERVES_STRIPED,
                ))
            }
            Command::ChangeVolume { read_only: Some(true), .. } if minor < Protocol::PROTECTS_VOLUMES => {
                Err(not_yet("volumes are read only", Protocol::PROTECTS_VOLUMES))
            }
            Command::SetLabels { of: Labelled::Host | Labelled::Device, .. }
                if minor < Protocol::LABELS_DEVICES =>
            {
                Err(not_yet("hosts and devices bear labels", Protocol::LABELS_DEVICES))
            }
            Command::SetInstanceType { instance_type, .. }
                if !instance_type.labels.is_empty() && minor < Protocol::LABELS_DEVICES =>
            {
                Err(not_yet("types of instances bear labels", Protocol::LABELS_DEVICES))
            }
            Command::DeleteDevice { .. } if minor < Protocol::DELETES_DEVICES => {
                Err(not_yet("devices are deleted without their hosts", Protocol::DELETES_DEVICES))
            }
            Command::CreateCopier { .. } | Command::EndCopier { .. } if minor < Protocol::HAS_COPIERS => {
                Err(not_yet("volumes that no instance uses are copied", Protocol::HAS_COPIERS))
            }
            _ => Ok(()),
        }
    }

    /// Keeps nothing that some of the pod does not know any more.
    pub(super) fn forget_newer(&mut self, effects: &mut Vec<Effect>) {
        if self.options.protocol_minor < Protocol::GROUPS_VOLUMES {
            self.forget_groups(effects);
        }
        if self.options.protocol_minor < Protocol::LABELS_DEVICES {
            self.forget_labels();
        }
        if self.options.protocol_minor < Protocol::REMEMBERS_VMMS {
            self.forget_vmms();
        }
        if self.options.protocol_minor < Protocol::ENDS_PROMISES {
            self.keep_promises();
        }
        if !self.looks_at_congestion() {
            self.forget_signals();
        }
        if !self.knows_ssds() {
            self.forget_identities();
        }
        if !self.shows_discards() {
            self.forget_discards();
        }
        if self.options.protocol_minor < Protocol::PROTECTS_VOLUMES {
            self.forget_protection(effects);
        }
        if !self.has_copiers() {
            self.forget_copiers(effects);
        }
        if !self.decides_by_more() {
            self.forget_adoptions();
        }
    }

    /// Whether instances may be there only for their frontend to copy. Replicas of 1.0 would take them for somebody's.
    pub(super) fn has_copiers(&self) -> bool {
        self.options.protocol_minor >= Protocol::HAS_COPIERS
    }

    /// Whether SSDs are known by what stands on them. Replicas of 1.0 go by their names.
    pub(super) fn knows_ssds(&self) -> bool {
        self.options.protocol_minor >= Protocol::KNOWS_SSDS
    }

    /// Whether is known what discards SSDs heed. Replicas of 1.0 do not keep it.
    pub(super) fn shows_discards(&self) -> bool {
        self.options.protocol_minor >= Protocol::SHOWS_DISCARDS
    }

    /// Whether moves in order keep a backup that carries what is reserved: all replicas have to move leases alike.
    pub(super) fn proves_moves(&self) -> bool {
        self.options.protocol_minor >= Protocol::PROVES_MOVES
    }

    /// Whether is remembered that a VMM used a device in the life before of its frontend. Replicas of 1.0 could not, and would let go of
    /// the device.
    pub(super) fn remembers_vmms(&self) -> bool {
        self.options.protocol_minor >= Protocol::REMEMBERS_VMMS
    }

    /// Whether what the kind of an instance promises of its volumes is noted beside what they are sure of themselves.
    pub(super) fn ends_promises(&self) -> bool {
        self.options.protocol_minor >= Protocol::ENDS_PROMISES
    }

    /// Whether is looked at what replicas of 1.0 overlook: all of them have to decide alike.
    pub(super) fn decides_by_more(&self) -> bool {
        self.options.protocol_minor >= Protocol::DECIDES_BY_MORE
    }

    /// Whether lines of boards are counted for each host, by what its instances use. Replicas of 1.0 count what all of the pod could.
    pub(super) fn shares_large_fabrics(&self) -> bool {
        self.options.protocol_minor >= Protocol::SHARES_LARGE_FABRICS
    }

    /// Whether hosts may look at how congested elements of the fabric are: replicas of 1.0 cannot read that they are to.
    pub(super) fn looks_at_congestion(&self) -> bool {
        self.options.protocol_minor >= Protocol::LOOKS_AT_CONGESTION
    }

    /// Whether network frontends are told where backends receive.
    pub(super) fn limits_backends(&self) -> bool {
        self.options.protocol_minor >= Protocol::LIMITS_BACKENDS
    }

    /// Whether volumes may move between two SSDs of one host: controllers of 1.0 refuse that, and the engines of 1.0 do not tell such
    /// places apart.
    pub fn moves_within_hosts(&self) -> bool {
        self.options.protocol_minor >= Protocol::MOVES_WITHIN_HOSTS
    }

    /// In which order NICs are filled now.
    pub fn nic_filling(&self) -> Filling {
        self.filling(self.options.placement.nics)
    }

    /// In which order SSDs are filled now.
    pub fn ssd_filling(&self) -> Filling {
        self.filling(self.options.placement.ssds)
    }

    /// Replicas of 1.0 spread whatever is wanted, and all have to place alike.
    fn filling(&self, wanted: Filling) -> Filling {
        if self.options.protocol_minor >= Protocol::PACKS_DEVICES { wanted } else { Filling::Spread }
    }

    /// What endpoints are told of it. In a pod of 1.0 some do not know that there is anything to tell.
    pub(super) fn add_protocol(&self, objects: &mut Objects) {
        let minor = self.options.protocol_minor;
        if minor >= Protocol::TELLS_POD_VERSION {
            objects.insert(ObjectId::Protocol, Object::Protocol(ProtocolObject { minor }));
        }
    }
}

/// Says that something has to wait for the last member of the pod.
pub(super) fn not_yet(what: &str, minor: u16) -> Refusal {
    let detail = format!(
        "{what} once all of the pod speaks {}: upgrade what podctl hosts and podctl controllers show with another version",
        Protocol::of_minor(minor)
    );
    Refusal::new(RefusalKind::Busy, detail)
}

impl Command {
    /// Whether the pod may speak an older version after it than before. A controller of that version may read the log from there
    /// on, and know none of the commands before.
    pub fn may_lower_protocol(&self) -> bool {
        matches!(self, Self::Configure { .. })
    }
}
