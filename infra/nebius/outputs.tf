output "slurm_login_ip" {
  description = "Address of the login node: ssh root@$(terraform output -raw slurm_login_ip)"
  value       = trimsuffix(nebius_vpc_v1_allocation.login.status.details.allocated_cidr, "/32")
}

output "slurm_workers" {
  description = "Total number of GPU nodes."
  value       = sum([for set in var.slurm_nodeset_workers : set.size])
}

output "storage" {
  description = "Shared file systems and the disks of each GPU node: mount path and size."
  value = merge(
    { for mount in var.filestore_jail_submounts : mount.mount_path => "${mount.spec.size_gibibytes} GiB" },
    { for mount in var.node_local_jail_submounts : mount.mount_path => "${mount.size_gibibytes} GiB per node" },
  )
}

output "kubernetes_cluster_id" {
  description = "For `nebius mk8s cluster get-credentials --id ID --external`."
  value       = nebius_mk8s_v1_cluster.this.id
}
