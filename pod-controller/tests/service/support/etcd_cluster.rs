//! A real etcd of three members, which die and hang by themselves.

use rustix::process::{Pid, Signal, kill_process};

use super::etcd_server::{Etcd, free_ports};

/// How many members it has; most of them have to work.
pub(crate) const MEMBERS: usize = 3;
/// How often other ports are tried where somebody was faster.
const ATTEMPTS: u32 = 5;

pub(crate) struct EtcdCluster {
    members: [Etcd; MEMBERS],
}

impl EtcdCluster {
    pub(crate) fn start() -> Self {
        for _ in 0..ATTEMPTS {
            let peers = free_ports::<MEMBERS>().map(|port| format!("http://127.0.0.1:{port}"));
            let named = |(number, peer): (usize, &String)| format!("m{number}={peer}");
            let cluster = peers.iter().enumerate().map(named).collect::<Vec<_>>().join(",");
            let member =
                |number: usize| Etcd::member("http", &format!("m{number}"), &peers[number], &cluster);
            let mut members: [Etcd; MEMBERS] = std::array::from_fn(member);
            members.iter_mut().for_each(Etcd::begin);
            if members.iter_mut().all(Etcd::is_ready) {
                return Self { members };
            }
        }
        panic!("the members of an etcd do not start");
    }

    /// All of its members, for a pod's prefix.
    pub(crate) fn address(&self, prefix: &str) -> String {
        let members = self.members.iter().map(|member| format!("127.0.0.1:{}", member.port()));
        format!("etcd://{}/{prefix}", members.collect::<Vec<_>>().join(","))
    }

    /// As if the member's host had died.
    pub(crate) fn kill(&mut self, member: usize) {
        self.members[member].kill();
    }

    /// The member is there again, with what it had. It does not wait for others.
    pub(crate) fn go_on(&mut self, member: usize) {
        self.members[member].begin();
    }

    /// Waits until the cluster is of use to somebody who asks this member.
    pub(crate) fn wait_for(&mut self, member: usize) {
        assert!(self.members[member].is_ready(), "member {member} of the etcd has ended");
    }

    /// The member takes connections, and answers nobody.
    pub(crate) fn hang(&self, member: usize) {
        self.signal(member, Signal::STOP);
    }

    /// It answers again.
    pub(crate) fn unhang(&self, member: usize) {
        self.signal(member, Signal::CONT);
    }

    fn signal(&self, member: usize, signal: Signal) {
        let process = self.members[member].running.as_ref().expect("it runs");
        kill_process(Pid::from_child(process), signal).expect("it is there");
    }
}
