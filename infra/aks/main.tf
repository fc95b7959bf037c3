# AKS with an InfiniBand GPU pool, the Blob CSI driver, and Managed Lustre where wanted.

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.location
}

resource "azurerm_virtual_network" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  address_space       = ["10.0.0.0/8"]
}

resource "azurerm_subnet" "nodes" {
  name                 = "nodes"
  resource_group_name  = azurerm_resource_group.this.name
  virtual_network_name = azurerm_virtual_network.this.name
  address_prefixes     = ["10.240.0.0/16"]
}

resource "azurerm_subnet" "lustre" {
  name                 = "lustre"
  resource_group_name  = azurerm_resource_group.this.name
  virtual_network_name = azurerm_virtual_network.this.name
  address_prefixes     = ["10.241.0.0/24"]
}

resource "azurerm_kubernetes_cluster" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  dns_prefix          = var.name
  kubernetes_version  = var.kubernetes_version
  # Pods take an Azure identity to reach storage; no keys lie anywhere.
  oidc_issuer_enabled       = true
  workload_identity_enabled = true

  default_node_pool {
    name           = "system"
    vm_size        = "Standard_D16ds_v5"
    node_count     = 2
    vnet_subnet_id = azurerm_subnet.nodes.id
  }

  identity {
    type = "SystemAssigned"
  }

  storage_profile {
    blob_driver_enabled = true
  }

  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    pod_cidr            = "192.168.0.0/16"
    service_cidr        = "172.16.0.0/16"
    dns_service_ip      = "172.16.0.10"
  }
}

resource "azurerm_kubernetes_cluster_node_pool" "gpu" {
  name                  = "gpu"
  kubernetes_cluster_id = azurerm_kubernetes_cluster.this.id
  vm_size               = var.gpu_vm_size
  node_count            = var.gpu_nodes
  vnet_subnet_id        = azurerm_subnet.nodes.id
  # The GPU operator brings driver and device plugin of one version for all nodes.
  gpu_driver  = "None"
  node_taints = ["sku=gpu:NoSchedule"]
  node_labels = { "keepstep/pool" = "gpu" }
}

resource "azurerm_managed_lustre_file_system" "this" {
  count = var.lustre == null ? 0 : 1

  name                   = "${var.name}-lustre"
  resource_group_name    = azurerm_resource_group.this.name
  location               = azurerm_resource_group.this.location
  sku_name               = var.lustre.sku_name
  subnet_id              = azurerm_subnet.lustre.id
  storage_capacity_in_tb = var.lustre.size_tib
  zones                  = [var.lustre.zone]

  maintenance_window {
    day_of_week        = var.lustre.day_of_week
    time_of_day_in_utc = var.lustre.time_utc
  }
}

# The Blob driver makes a storage account for each claim, and needs to be allowed to.
resource "azurerm_role_assignment" "storage" {
  scope                = azurerm_resource_group.this.id
  role_definition_name = "Contributor"
  principal_id         = azurerm_kubernetes_cluster.this.identity[0].principal_id
}
