output "credentials" {
  description = "The command that lets kubectl in."
  value       = "az aks get-credentials --resource-group ${azurerm_resource_group.this.name} --name ${azurerm_kubernetes_cluster.this.name}"
}

output "gpu_nodes" {
  description = "GPU nodes in the pool."
  value       = azurerm_kubernetes_cluster_node_pool.gpu.node_count
}

output "lustre_address" {
  description = "Management address of the Lustre file system; null where there is none."
  value       = var.lustre == null ? null : azurerm_managed_lustre_file_system.this[0].mgs_address
}
