use std::io::Write;
use std::time::Duration;

use pod_api::client::{Client, ClientError};
use pod_api::{
    AddReplica, ByteSize, ChangeVolume, CreateInstance, CreateVolume, DeviceAnswer, InstanceTypeSpec, Labels,
    Stripes, VolumeGroups,
};

use crate::Failure;
use crate::arguments::{
    Arguments, Command, Controllers, Devices, Events, Explain, Fields, Hosts, Instances, Output, PoolPart,
    Types, Volumes,
};
use crate::show::{done, show};
use crate::{balance, completion, doctor, hotplug, map, mchannels, output, said, table, token, top, watch};

/// How many events are shown of those that happened already, unless told.
const EVENTS_SHOWN: usize = 50;

/// The status that says that there is no such event, or that those after it are not kept.
const GONE: u16 = 410;

type Out<'a> = &'a mut dyn Write;

/// Carries out a command and shows the answer.
pub(crate) fn run(arguments: &Arguments, out: Out<'_>) -> Result<(), Failure> {
    if let Command::Completion { shell } = arguments.command {
        return Ok(completion::script(shell, out)?);
    }
    if let Command::Token { name, role, host } = &arguments.command {
        return token::make(name, role, host.as_deref(), out);
    }
    let client = arguments.credentials.client(&arguments.server)?.trying_only(arguments.dry_run);
    let client = client.expecting(arguments.if_version.clone());
    if let Command::Top(top) = &arguments.command
        && top::fills_screen(top, arguments.output)
    {
        return top::live(client, top);
    }
    let client = &client;
    match arguments.watch {
        None => {
            carry_out(client, arguments, out)?;
            if let Some(why) = missing(client, arguments) {
                // Not among what was asked for: programs read that.
                eprintln!("note: {why}");
            }
            Ok(())
        }
        Some(seconds) if arguments.command.looks() => {
            watch::repeat(Duration::from_secs_f64(seconds), out, |shown| {
                carry_out(client, arguments, shown)?;
                let is_for_people = matches!(arguments.output, Output::Table | Output::Wide);
                if let Some(why) = missing(client, arguments).filter(|_| is_for_people) {
                    writeln!(shown, "\n{why}")?;
                }
                Ok(())
            })
        }
        Some(_) => {
            Err(Failure::Usage("--watch is for commands that only look, such as hosts list".to_owned()))
        }
    }
}

/// Why what daemons measure is missing in what was shown, unless that says it itself.
fn missing(client: &Client, arguments: &Arguments) -> Option<String> {
    let says_it = matches!(arguments.command, Command::Top(_) | Command::Balance);
    client.take_unmeasured().filter(|_| !says_it)
}

fn carry_out(client: &Client, arguments: &Arguments, out: Out<'_>) -> Result<(), Failure> {
    let format = arguments.output;
    match &arguments.command {
        Command::Completion { .. } | Command::Token { .. } => Ok(()),
        Command::Top(top) => top::run(client, top, format, out),
        Command::Doctor { config } => doctor::run(config, format, out),
        Command::Hosts(command) => hosts(client, command, format, out),
        Command::Devices(command) => devices(client, command, format, out),
        Command::Volumes(command) => volumes(client, command, arguments, out),
        Command::Instances(command) => instances(client, command, arguments, out),
        Command::Types(command) => types(client, command, format, out),
        Command::Mchannels(command) => mchannels::run(client, command, format, out),
        Command::Explain(Explain::Instance { name }) => {
            show(out, format, &client.explain_instance(name)?, output::explanation)
        }
        Command::Balance => {
            show(out, format, &client.balance()?, |it| balance::balance(it, format == Output::Wide))
        }
        Command::Controllers(Controllers::List) => {
            show(out, format, &client.controllers()?, |controllers| table::controllers(controllers))
        }
        Command::Controllers(Controllers::Remove { replica }) => {
            client.remove_controller(*replica)?;
            done(
                client,
                out,
                format,
                ("controller", &replica.to_string()),
                ("is no member any more", "would be no member any more"),
            )
        }
        Command::Events(events) => follow(client, events, format, out),
        Command::Pool { part: Some(PoolPart::Regions(asked)) } => {
            show(out, format, &client.pool_with(&borrowed(&asked.fields()))?, map::regions)
        }
        Command::Pool { part } => show(out, format, &client.pool()?, |pool| match part {
            Some(PoolPart::Map) => map::use_of(pool),
            Some(PoolPart::Regions(_)) | None => map::pool(pool),
        }),
    }
}

fn hosts(client: &Client, command: &Hosts, format: Output, out: Out<'_>) -> Result<(), Failure> {
    match command {
        Hosts::List(asked) => {
            let hosts = client.hosts_with(&borrowed(&asked.fields()))?;
            show(out, format, &hosts, |hosts| table::hosts(hosts, format == Output::Wide))
        }
        Hosts::Label(label) => {
            let host = match label.changes() {
                Some(changes) => client.relabel_host(&label.name, &changes)?,
                None => client.label_host(&label.name, &labelled(&label.labels))?,
            };
            show(out, format, &host, output::host)
        }
        Hosts::Get { name } => show(out, format, &client.host(name)?, output::host),
        Hosts::Drain { name } => {
            client.drain_host(name, true)?;
            done(client, out, format, ("host", name), ("is to be empty", "would have to be empty"))
        }
        Hosts::Undrain { name } => {
            client.drain_host(name, false)?;
            done(client, out, format, ("host", name), ("may be used again", "might be used again"))
        }
        Hosts::Reset { name } => {
            client.reset_host(name)?;
            done(client, out, format, ("host", name), ("reset", "would be reset"))
        }
        Hosts::Delete { name } => {
            client.delete_host(name)?;
            done(client, out, format, ("host", name), ("deleted", "would be deleted"))
        }
    }
}

fn devices(client: &Client, command: &Devices, format: Output, out: Out<'_>) -> Result<(), Failure> {
    let split = |name: &str| match name.split_once('/') {
        Some((host, device)) => Ok((host.to_owned(), device.to_owned())),
        None => Err(Failure::Usage(format!("{name:?} is no device: write host and name, such as h2/nic0"))),
    };
    match command {
        Devices::List(asked) => {
            let devices = client.devices_with(&borrowed(&asked.fields()))?;
            show(out, format, &devices, |devices| table::devices(devices, format == Output::Wide))
        }
        Devices::Label(label) => {
            let (host, name) = split(&label.name)?;
            let device = match label.changes() {
                Some(changes) => client.relabel_device(&host, &name, &changes)?,
                None => client.label_device(&host, &name, &labelled(&label.labels))?,
            };
            show(out, format, &device, output::device)
        }
        Devices::Get { name } => {
            let (host, device) = split(name)?;
            show(out, format, &client.device(&host, &device)?, output::device)
        }
        Devices::Adopt { name } => {
            let (host, device) = split(name)?;
            show(out, format, &client.adopt_volumes(&host, &device)?, output::device)
        }
        Devices::Delete { name, lose_data } => {
            let (host, device) = split(name)?;
            client.delete_device(&host, &device, *lose_data)?;
            done(client, out, format, ("device", name), ("deleted", "would be deleted"))
        }
        Devices::FailBack { name } => {
            let (host, device) = split(name)?;
            let stay = client.fail_back(&host, &device)?;
            show(out, format, &stay, |stay| output::failed_back(name, stay, client.is_trying_only()))
        }
        Devices::Drain { name } => {
            let (host, device) = split(name)?;
            client.drain_device(&host, &device, true)?;
            done(client, out, format, ("device", name), ("is to be empty", "would have to be empty"))
        }
        Devices::Undrain { name } => {
            let (host, device) = split(name)?;
            client.drain_device(&host, &device, false)?;
            done(client, out, format, ("device", name), ("may be used again", "might be used again"))
        }
        Devices::Release { name } => {
            let (host, device) = split(name)?;
            client.release_link(&host, &device)?;
            done(client, out, format, ("device", name), ("is trusted again", "would be trusted again"))
        }
    }
}

fn volumes(client: &Client, command: &Volumes, arguments: &Arguments, out: Out<'_>) -> Result<(), Failure> {
    let (format, meant) = (arguments.output, arguments.if_version.as_deref());
    match command {
        Volumes::List(asked) => {
            let volumes = client.volumes_with(&borrowed(&asked.fields()))?;
            show(out, format, &volumes, |volumes| table::volumes(volumes, format == Output::Wide))
        }
        Volumes::Label(label) => {
            let volume = match label.changes() {
                Some(changes) => client.relabel_volume(&label.name, &changes)?,
                None => client.label_volume(&label.name, &labelled(&label.labels))?,
            };
            show(out, format, &volume, output::volume)
        }
        Volumes::Get { name } => show(out, format, &client.volume(name)?, output::volume),
        Volumes::Create {
            name,
            size,
            device,
            near,
            replicas,
            minimum_iops,
            minimum_bandwidth,
            stripes,
            stripe_size,
            apart,
            together,
            labels,
        } => {
            let request = CreateVolume {
                device: device.clone(),
                near: near.clone(),
                replicas: *replicas,
                minimum_iops: *minimum_iops,
                minimum_bytes_per_second: minimum_bandwidth.map(ByteSize::get),
                stripes: stripes.map(|columns| Stripes { columns, size: *stripe_size }),
                apart: apart.clone(),
                together: together.clone(),
                labels: labelled(labels).labels,
                ..CreateVolume::new(name, *size)
            };
            show(out, format, &client.create_volume(&request)?, output::volume)
        }
        Volumes::Grow { name, size } => {
            let request = ChangeVolume { size: Some(*size), ..ChangeVolume::default() };
            show(out, format, &client.change_volume(name, &request)?, output::volume)
        }
        Volumes::Move { name, to, from } => {
            let replaces = if let Some(from) = from {
                from.clone()
            } else {
                let volume = client.volume(name)?;
                if volume.stripe_bytes.is_some() {
                    let detail = format!("{name} is striped: say with --from which of its columns moves");
                    return Err(Failure::Usage(detail));
                }
                volume.device
            };
            let request = AddReplica { device: to.clone(), replaces: Some(replaces) };
            show(out, format, &client.add_replica(name, &request)?, output::volume)
        }
        Volumes::AddReplica { name, device } => {
            let request = AddReplica { device: device.clone(), replaces: None };
            show(out, format, &client.add_replica(name, &request)?, output::volume)
        }
        Volumes::RemoveReplica { name, device } => {
            let (host, ssd) = device.split_once('/').unwrap_or((device, ""));
            show(out, format, &client.remove_replica(name, host, ssd)?, output::volume)
        }
        Volumes::Qos(changes) => {
            show(out, format, &said::change_qos(client, changes, meant)?, output::volume)
        }
        Volumes::Group { name, apart, together } => {
            let groups = VolumeGroups { apart: apart.clone(), together: together.clone() };
            let request = ChangeVolume { groups: Some(groups), ..ChangeVolume::default() };
            show(out, format, &client.change_volume(name, &request)?, output::volume)
        }
        Volumes::ReadOnly { name, off } => {
            let request = ChangeVolume { read_only: Some(!off), ..ChangeVolume::default() };
            show(out, format, &client.change_volume(name, &request)?, output::volume)
        }
        Volumes::Delete { name } => {
            client.delete_volume(name)?;
            done(client, out, format, ("volume", name), ("deleted", "would be deleted"))
        }
    }
}

fn instances(
    client: &Client,
    command: &Instances,
    arguments: &Arguments,
    out: Out<'_>,
) -> Result<(), Failure> {
    let (format, meant) = (arguments.output, arguments.if_version.as_deref());
    match command {
        Instances::List(asked) => {
            let instances = client.instances_with(&borrowed(&asked.fields()))?;
            show(out, format, &instances, |instances| table::instances(instances, format == Output::Wide))
        }
        Instances::Label(label) => {
            let instance = match label.changes() {
                Some(changes) => client.relabel_instance(&label.name, &changes)?,
                None => client.label_instance(&label.name, &labelled(&label.labels))?,
            };
            show(out, format, &instance, output::instance)
        }
        Instances::Priority { name, priority } => {
            show(out, format, &client.prioritize_instance(name, *priority)?, output::instance)
        }
        Instances::Get { name } => show(out, format, &client.instance(name)?, output::instance),
        Instances::Create(create) => {
            let request = CreateInstance {
                name: create.name.clone(),
                host: create.host.clone(),
                nics: create.nics.clone(),
                volumes: create.volumes.clone(),
                instance_type: create.instance_type.clone(),
                vmm_listens: create.vmm_listens,
                ram_bytes: create.ram.map(ByteSize::get),
                priority: create.priority,
                labels: labelled(&create.labels).labels,
            };
            show(out, format, &client.create_instance(&request, create.wait)?, output::instance)
        }
        Instances::Attach(asked) => show(out, format, &hotplug::attach(client, asked)?, output::instance),
        Instances::Detach { name, device, force, wait } => {
            hotplug::detach(client, name, device, *force, *wait)?;
            done(client, out, format, ("device", device), ("has left", "would have to leave"))
        }
        Instances::Answer { name, device, plugged, unplugged: _, refused } => {
            let answer = DeviceAnswer { plugged: *plugged, refused: refused.clone() };
            client.answer_device(name, device, &answer)?;
            done(client, out, format, ("device", device), ("is answered for", "would be answered for"))
        }
        Instances::NicPolicy(changes) => {
            said::change_nic(client, changes, meant)?;
            let name = &changes.name;
            done(client, out, format, ("instance", name), ("has a new policy", "would have a new policy"))
        }
        Instances::MigrateNic { name, nic, to } => {
            client.migrate_nic(name, nic, to.as_deref())?;
            done(client, out, format, ("instance", name), ("moves", "would move"))
        }
        Instances::Migrate { name, to } => {
            show(out, format, &client.migrate_instance(name, to)?, output::instance)
        }
        Instances::AbortMigration { name } => {
            client.abort_migration(name)?;
            done(client, out, format, ("instance", name), ("stays where it is", "would stay where it is"))
        }
        Instances::ActivateMigration { name, force } => {
            client.activate_migration(name, *force)?;
            done(client, out, format, ("instance", name), ("moved", "would have moved"))
        }
        Instances::Delete { name, force } => {
            if *force {
                client.delete_instance_by_force(name)?;
            } else {
                client.delete_instance(name)?;
            }
            done(client, out, format, ("instance", name), ("deleted", "would be deleted"))
        }
    }
}

fn labelled(labels: &[(String, String)]) -> Labels {
    Labels { labels: labels.iter().cloned().collect() }
}

fn borrowed(fields: &Fields) -> Vec<(&str, &str)> {
    fields.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

fn types(client: &Client, command: &Types, format: Output, out: Out<'_>) -> Result<(), Failure> {
    match command {
        Types::List { asked } => {
            let types = client.instance_types_with(&borrowed(&asked.fields()))?;
            show(out, format, &types, |types| table::instance_types(types, format == Output::Wide))
        }
        Types::Get { name } => show(out, format, &client.instance_type(name)?, |it| {
            table::instance_types(std::slice::from_ref(it), true)
        }),
        Types::Set { name, nics, reserve, queue_pairs, volume_iops, priority, labels } => {
            let spec = InstanceTypeSpec {
                nics: *nics,
                reserved_mbps: *reserve,
                queue_pairs: *queue_pairs,
                volume_iops: *volume_iops,
                priority: *priority,
                labels: labelled(labels).labels,
            };
            client.set_instance_type(name, &spec)?;
            done(client, out, format, ("instance type", name), ("set", "would be set"))
        }
        Types::Delete { name } => {
            client.delete_instance_type(name)?;
            done(client, out, format, ("instance type", name), ("deleted", "would be deleted"))
        }
    }
}

/// That events after this one are not kept any more, if that is so.
fn missed(after: u64, first_kept: u64) -> Option<String> {
    let first = after.saturating_add(1);
    let last = first_kept.checked_sub(1).filter(|last| *last >= first)?;
    Some(format!(
        "events {first} to {last} are not kept any more: look at the lists for what has become of it"
    ))
}

fn follow(client: &Client, events: &Events, format: Output, out: Out<'_>) -> Result<(), Failure> {
    let fields = events.fields();
    let (known, after) = match client.events_with(events.after.unwrap_or(0), &fields) {
        // The controller goes on from a backup: what it kept, and what came since, may all be news.
        Err(error) if error.status() == Some(GONE) => {
            eprintln!("{error}; these are all that are kept");
            (client.events_with(0, &fields)?, None)
        }
        known => (known?, events.after),
    };
    // Of a controller that does not say which one was the last, what was shown tells.
    let shown = known.events.last().map_or(after.unwrap_or(known.first.saturating_sub(1)), |it| it.sequence);
    let seen = known.last.max(shown);
    if let Some(missed) = after.and_then(|after| missed(after, known.first)) {
        // Not among the events: whoever reads those need not know of it.
        eprintln!("{missed}");
    }
    // Whoever says after which one wants all of them.
    let last = events.last.unwrap_or(if events.after.is_some() { usize::MAX } else { EVENTS_SHOWN });
    let recent = &known.events[known.events.len().saturating_sub(last)..];
    if matches!(format, Output::Json | Output::Yaml) && !events.follow {
        return show(out, format, &recent, |_| String::new());
    }
    for event in recent {
        writeln!(out, "{}", output::event_line(event, format)?)?;
    }
    if !events.follow {
        return Ok(());
    }
    out.flush()?;
    let mut stream = client.follow_events_with(seen, &fields)?;
    let why = loop {
        match stream.next() {
            Some(Ok(event)) => writeln!(out, "{}", output::event_line(&event, format)?)?,
            Some(Err(error @ ClientError::Unreachable { .. })) => break error.to_string(),
            Some(Err(error)) => return Err(error.into()),
            None => break "the controller went away".to_owned(),
        }
        out.flush()?;
    };
    let seen = stream.seen().unwrap_or(seen);
    Err(Failure::Usage(format!("{why}; go on with podctl events --follow --after {seen}")))
}
