output "slurm_login_ip" {
  description = "Address of the login node: ssh root@$(terraform output -raw slurm_login_ip)"
  value       = trimsuffix(nebius_vpc_v1_allocation.login.status.details.allocated_cidr, "/32")
}

output "slurm_workers" {
  description = "GPU nodes in all."
  value       = sum([for set in var.slurm_nodeset_workers : set.size])
}

output "storage" {
  description = "Shared file systems: where each is mounted and how large it is."
  value       = { for mount in var.filestore_jail_submounts : mount.mount_path => "${mount.spec.size_gibibytes} GiB" }
}

output "kubernetes_cluster_id" {
  description = "For `nebius mk8s cluster get-credentials --id ID --external`."
  value       = nebius_mk8s_v1_cluster.this.id
}
