output "credentials" {
  description = "The command that gives kubectl access."
  value       = "az aks get-credentials --resource-group ${azurerm_resource_group.this.name} --name ${azurerm_kubernetes_cluster.this.name}"
}

output "gpu_nodes" {
  description = "GPU nodes in the pool."
  value       = azurerm_kubernetes_cluster_node_pool.gpu.node_count
}

output "lustre_address" {
  description = "Management address of the Lustre file system; null if there is none."
  value       = var.lustre == null ? null : azurerm_managed_lustre_file_system.this[0].mgs_address
}

output "storage" {
  description = "The command that makes Lustre a volume of the cluster; null if Terraform owns no file system."
  value = var.lustre == null ? null : join(" ", [
    "helm install shared-storage charts/shared-storage",
    "--set amlfs.mgsAddress=${azurerm_managed_lustre_file_system.this[0].mgs_address}",
    "--set amlfs.storageCapacityTiB=${var.lustre.size_tib}",
  ])
}
